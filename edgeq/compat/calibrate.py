"""python -m edgeq.compat.calibrate: the calibrate command of ONNX Runtime's 2020 tool and its RISC-V fork.

Its options, its data sets (a folder of images, test_data_set_N folders, a folder with input_0.pb, one stacked .pb) and
its choices: QOperator format, scalar weight scales, symmetric int8 or asymmetric uint8, ranges from minima and maxima.
Everything behind is edgeq's own `quantize`. Imported, it stands for `onnxruntime.quantization.calibrate`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from edgeq import compat
from edgeq.callable_package import make_callable
from edgeq.errors import EdgeqError, UsageError

INTERRUPTED = 130
_PREPROCESS = ("mxnet", "caffe", "caffe2", "rcnn", "preprocess_method1", "preprocess_method2", "None")
_METHODS = {"naive": "minmax", "minmax": "minmax", "mean": "moving-average", "percentile": "percentile"}
_METHODS |= {"entropy": "entropy", "mse": "mse"}
_TRUE = ("true", "1", "yes")


@click.command("calibrate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--dataset_path", required=True, help="Images, test_data_set_N folders, input_N.pb, or one stacked .pb.")
@click.option(
    "--output_model_path",
    type=click.Path(path_type=Path),
    default=Path("calibrated_quantized_model.onnx"),
    show_default=True,
    help="Quantized model; replaced if it exists, as it always was.",
)
@click.option("--dataset_size", type=click.IntRange(min=0), default=0, help="First so many samples; 0 takes all.")
@click.option("--data_preprocess", type=click.Choice(_PREPROCESS), required=True, help="What is done to the samples.")
@click.option("--static", required=True, help="true, 1 or yes: ranges from the samples. Else: dynamic.")
@click.option("--mode", type=click.Choice(["int8", "uint8"]), default="int8", show_default=True, help="Integer type.")
@click.option("--calib_mode", type=click.Choice(list(_METHODS)), default="naive", help="How ranges are derived.")
@click.option("--op_types", help="Operator types to quantize, separated by commas.")
@click.option("--black_nodes", help="Nodes to keep in float, separated by commas.")
@click.option("--white_nodes", help="The only nodes to quantize, separated by commas.")
@click.option("--augmented_model_path", help="Not needed any more; accepted and not written.")
@click.option("--force_fusions", help="Fusions are always done; accepted.")
def command(**options: Any) -> None:
    """Calibrate and quantize a model as the older calibrate.py did."""
    try:
        click.echo(run(**options))
    except EdgeqError as error:
        click.echo(f"edgeq: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("edgeq: interrupted; nothing half-written was left behind", err=True)
        sys.exit(INTERRUPTED)


def run(
    *,
    model_path: Path,
    dataset_path: str,
    output_model_path: Path,
    dataset_size: int,
    data_preprocess: str,
    static: str,
    mode: str,
    calib_mode: str,
    op_types: str | None,
    black_nodes: str | None,
    white_nodes: str | None,
    augmented_model_path: str | None = None,
    force_fusions: str | None = None,
) -> str:
    """Do what the options say; the line to print."""
    from edgeq.pipeline.job import Data
    from edgeq.pipeline.quantize import quantize

    del augmented_model_path, force_fusions
    overrides: dict[str, Any] = {"mode": "dynamic"}
    if static.strip().lower() in _TRUE:
        overrides = {
            "mode": "static",
            "format": "QOperator",
            "activation_type": mode,
            "weight_type": mode,
            "activation_symmetric": mode == "int8",
            "weight_symmetric": mode == "int8",
            "per_channel": False,
            "reduce_range": False,
            "method": _METHODS[calib_mode],
            "method_options": {},
        }
    if op_types:
        overrides["op_types"] = tuple(_listed(op_types))
    excluded = [*_listed(black_nodes), *_others(model_path, _listed(white_nodes))]
    if excluded:
        overrides["exclude"] = tuple(excluded)
    result = quantize(
        model_path,
        Data(dataset_path, data_preprocess.lower(), count=dataset_size or None),
        output_model_path,
        overrides=overrides,
        timed=False,
        force=True,
    )
    return f"{output_model_path}: {result.scheme.mode} {result.scheme.format} {result.scheme.pair}"


def _listed(text: str | None) -> Sequence[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _others(model_path: Path, kept: Sequence[str]) -> Sequence[str]:
    """All nodes but `kept`, when there are any to keep."""
    if not kept:
        return []
    from edgeq.model.load import load_model

    names = [node.name for node in load_model(model_path, external_data="none").graph.node if node.name]
    unknown = sorted(set(kept) - set(names))
    if unknown:
        raise UsageError(f"{model_path} has no node {unknown[0]!r}", "`edgeq inspect` lists the nodes")
    return [name for name in names if name not in kept]


def __getattr__(name: str) -> Any:
    return getattr(compat, name)


if __name__ == "__main__":
    command()
else:
    make_callable(__name__, "edgeq.compat.tables:calibrate")
