"""Run the command of ONNX Runtime's image classification example (run.py): python -m edgeq.compat.run.

The command calibrates on a folder, quantizes the model, and times both models. It works like `edgeq quantize`: the
profile of this machine determines the integer types and the operators to quantize, and edgeq proves the result before
writing it.
"""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS, switch
from edgeq.compat._preprocessing import images_or_arrays
from edgeq.compat._printing import PrintedProgress, says
from edgeq.compat.readers import RESNET50
from edgeq.data.open_source import Data
from edgeq.jobs.quantize import quantize
from edgeq.quantization.quantizer import quiet
from edgeq.util.records import plain

_FORMATS = ("QDQ", "QOperator")


@click.command("run", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--input_model", type=click.Path(path_type=Path), required=True, help="Float model, preprocessed or not.")
@click.option("--output_model", type=click.Path(path_type=Path), required=True, help="Result; replaced if it exists.")
@click.option("--calibrate_dataset", default="./test_images", help="Images, .npz, .pb ...")
@click.option(
    "--quant_format", type=click.Choice(_FORMATS, case_sensitive=False), default="QDQ", help="Format of the result."
)
@switch("--per_channel", help="One weight scale per channel.")
@click.option("--preprocess", help=f"Preprocessing; see `edgeq preprocess`. [images: {RESNET50}]")
@click.option("--profile", default="auto", help="Hardware that the model is for; auto is this machine.")
@says
def command(
    *,
    input_model: Path,
    output_model: Path,
    calibrate_dataset: str,
    quant_format: str,
    per_channel: bool,
    preprocess: str | None,
    profile: str,
) -> list[str]:
    """Calibrate, quantize and time an image classifier."""
    # Arrays need no preprocessing, so the default applies only to images.
    data = Data(calibrate_dataset, preprocess or images_or_arrays(calibrate_dataset, RESNET50))
    with quiet():
        result = quantize(
            input_model,
            data,
            output_model,
            target=profile,
            overrides={"mode": "static", "format": quant_format, "per_channel": per_channel},
            effort=None,
            # The older command always replaced its output.
            force=True,
            progress=PrintedProgress(),
        )
    proof = plain(result.proof)
    lines = [f"Calibrated and quantized model saved: {output_model} ({result.scheme.title})"]
    if proof["speed"] is not None:
        latency = proof["speed"]["latency"]
        lines += [f"{name}: {figures['mean_ms']:.2f} ms on average" for name, figures in latency.items()]
    lines += [f"warning: {warning}" for warning in proof["warnings"]]
    lines += [f"set the session option {key}={value}" for key, value in result.session_options.items()]
    return lines


if __name__ == "__main__":
    run_program(command)
