"""Run the debugging command of ONNX Runtime's examples (run_qdq_debug.py): python -m edgeq.compat.run_qdq_debug.

For each weight and each activation, the command prints how close the quantized model is to the float model, in dB.
`edgeq debug` finds which layers lose accuracy, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from edgeq_device.system.places import scratch_folder

from edgeq.compat import qdq_loss_debug as debug
from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS
from edgeq.compat._preprocessing import images_or_arrays
from edgeq.compat._printing import says
from edgeq.compat.readers import RESNET50, DataReader


@click.command("run_qdq_debug", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--float_model", type=click.Path(path_type=Path), required=True, help="Model that was quantized.")
@click.option("--qdq_model", type=click.Path(path_type=Path), required=True, help="Quantized model.")
@click.option("--calibrate_dataset", default="./test_images", help="Images, .npz, .pb ...")
@click.option("--preprocess", help=f"Preprocessing; see `edgeq preprocess`. [images: {RESNET50}]")
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=8,
    help="Maximum number of samples. All their activations are kept in memory.",
)
@says
def command(
    *, float_model: Path, qdq_model: Path, calibrate_dataset: str, preprocess: str | None, count: int
) -> Iterator[str]:
    """Compare the weights and activations of a float model with those of its quantized form."""
    weights = debug.compute_weight_error(debug.create_weight_matching(float_model, qdq_model))
    yield "Weights: float against dequantized:"
    for name, error in weights.items():
        yield f"  {name}: {error:.2f} dB"
    preprocess = preprocess or images_or_arrays(calibrate_dataset, RESNET50)
    activations = []
    with scratch_folder("edgeq-debug-") as folder:
        # The order is that of the arguments of `create_activation_matching`.
        for model in (qdq_model, float_model):
            augmented = Path(folder) / "augmented.onnx"
            debug.modify_model_output_intermediate_tensors(model, augmented)
            # A new reader starts at the first sample, so both models get the same inputs.
            reader = DataReader(calibrate_dataset, model, preprocess=preprocess, end_index=count)
            activations.append(debug.collect_activations(augmented, reader))
    yield "Activations: float model against quantized model, and before against after rounding:"
    for name, errors in debug.compute_activation_error(debug.create_activation_matching(*activations)).items():
        across = f"{errors['xmodel_err']:.2f} dB" if "xmodel_err" in errors else "not in the float model"
        yield f"  {name}: {across}, {errors['qdq_err']:.2f} dB"


if __name__ == "__main__":
    run_program(command)
