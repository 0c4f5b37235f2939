"""Run the calibrate command of ONNX Runtime's 2020 tool and of its RISC-V fork: python -m edgeq.compat.calibrate.

The command accepts the same options and the same data sets: a folder of images, test_data_set_N folders, a folder with
input_0.pb, or one stacked .pb. It makes the same choices:

- Static int8 gives the fork's dialect for the systolic array, and next to it a model that stock ONNX Runtime runs.
- Static uint8 gives asymmetric QOperator. Only the fork has the options --static and --mode. If neither is given, the
  result is static uint8.
- Dynamic quantization gives ConvInteger and MatMulInteger, with weights of the type that --mode sets.
- Weight scales are per tensor, and ranges are minima and maxima.

edgeq's own `quantize` does the work. The module also replaces `onnxruntime.quantization.calibrate` in imports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgeq.backends.systolic.save import belongs_to_program
from edgeq.compat._callable import make_callable
from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._names import find
from edgeq.compat._options import SETTINGS
from edgeq.compat._preprocessing import images_or_arrays
from edgeq.compat._printing import says
from edgeq.compat.readers import RESNET50
from edgeq.data.axes import model_size
from edgeq.data.open_source import Data
from edgeq.data.preprocess import Preprocess, load_preprocess
from edgeq.errors import ModelError, UsageError
from edgeq.jobs import quantize as job
from edgeq.model.files import model_files
from edgeq.model.load import model_signature, read_model
from edgeq.util.outputs import check_apart, output_file

_SIZES = 3
"""Number of arguments of a function in the older form: the path of the image and two sizes."""


def own_preprocess(text: str, model: Path) -> Preprocess:
    """Return the preprocessing "file.py:function".

    A function of one argument has edgeq's own form (see `edgeq.data.preprocess.register`). A function of three
    arguments gets the path of an image (str), and the height and width of the model's first input. The names of the
    function's arguments determine the order of the two sizes.

    Raises:
        DataError: the file or the function cannot be loaded.
        UsageError: the function needs the sizes, but the model leaves them free.
    """
    loaded = load_preprocess(text)
    function = loaded.function
    assert function is not None, "it names a function"
    required = _required_arguments(function)
    if len(required) < _SIZES:
        return loaded
    size = model_size(model_signature(model).inputs[0])
    if size is None:
        raise UsageError(
            f"{model} leaves its height and width free, and {text} needs them",
            "Give a function of one argument, the image as uint8 [H, W, 3]",
        )
    width, height = size
    # Scripts define either order, and only the name of the argument tells which.
    sizes = (width, height) if required[1].startswith("w") else (height, width)
    return replace(loaded, reads="path", function=lambda path: function(str(path), *sizes))  # type: ignore[call-arg]


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the positional arguments that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    # Arguments with a default are the script's own and are never passed.
    return [entry.name for entry in parameters if entry.kind in kinds and entry.default is inspect.Parameter.empty]


# The target of edgeq for the fork's systolic array.
_ARRAY = "gemmini"
_PREPROCESS = {name: name for name in ("mxnet", "caffe", "caffe2", "rcnn", "preprocess_method1", "preprocess_method2")}
_PREPROCESS |= {"method1": "preprocess_method1", "method2": "preprocess_method2", "None": "none", "none": "none"}
_MODES = {"int8": "int8", "int": "int8", "uint8": "uint8"}
"""Value of --mode → weight type. `int` appears in the fork's notes on object detection, but the fork's parser did not
accept it.
"""
# The first two names are the older tool's words for the same method. The others are edgeq's own.
_METHODS = {"naive": "minmax", "minmax": "minmax", "mean": "moving-average", "percentile": "percentile"}
_METHODS |= {"entropy": "entropy", "mse": "mse"}
# The fork's parser took any other text for false.
_TRUE = ("true", "1", "yes")
_FASTEST = {
    **dict.fromkeys(("Attention", "EmbedLayerNormalization", "GRU", "Gather", "Gemm", "LSTM", "MatMul"), "int8"),
    "Conv": "uint8",
}
"""Operator type that becomes an integer operator without --static → the weight type of its fastest kernels. In
onnxruntime 1.31, MatMulInteger takes 2.4 times as long with uint8, and ConvInteger takes 4.8 times as long with int8.
"""
_UPSTREAM = (
    "static uint8 for stock ONNX Runtime, as in 2019 and 2020; for the systolic array add --static=True --mode=int8"
)


@click.command("calibrate", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--model_path", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--dataset_path", required=True, help="Images, test_data_set_N folders, input_N.pb, or one stacked .pb.")
@click.option(
    "--output_model_path",
    type=click.Path(path_type=Path),
    default=Path("calibrated_quantized_model.onnx"),
    help="Quantized model; an existing file is replaced.",
)
@click.option("--dataset_size", type=click.IntRange(min=0), default=0, help="Number of samples to use; 0 means all.")
@click.option(
    "--data_preprocess",
    help=f"{', '.join(_PREPROCESS)}, a .toml file, or file.py:function(path, height, width). [images: {RESNET50}; "
    "tensors: None]",
)
@click.option(
    "--static", help="true, 1 or yes: ranges come from the samples. Else they are measured at run time. [true]"
)
@click.option("--mode", type=click.Choice(list(_MODES)), help="Integer type. [int8 with --static, else uint8]")
@click.option("--calib_mode", type=click.Choice(list(_METHODS)), default="naive", help="How ranges are derived.")
@click.option("--op_types", help="Operator types to quantize, separated by commas.")
@click.option("--black_nodes", help="Nodes to keep in float, separated by commas.")
@click.option("--white_nodes", help="The only nodes to quantize, separated by commas.")
@click.option("--augmented_model_path", help="Accepted and ignored: no augmented model is needed.", expose_value=False)
@click.option(
    "--force_fusions",
    is_flag=False,
    flag_value="true",
    help="Accepted and ignored: edgeq always fuses.",
    expose_value=False,
)
@says
def command(
    *,
    model_path: Path,
    dataset_path: str,
    output_model_path: Path,
    dataset_size: int,
    data_preprocess: str | None,
    static: str | None,
    mode: str | None,
    calib_mode: str,
    op_types: str | None,
    black_nodes: str | None,
    white_nodes: str | None,
    augmented_model_path: str | None = None,
    force_fusions: str | None = None,
) -> list[str]:
    """Calibrate and quantize a model with the options of the older calibrate.py."""
    del augmented_model_path, force_fusions
    # What the command decided by itself is printed, because the two older tools decided differently.
    assumed = []
    weight_types = _FASTEST if mode is None else dict.fromkeys(_FASTEST, _MODES[mode])
    if mode is None:
        mode = "uint8" if static is None else "int8"
        assumed = (
            [f"note: neither --static nor --mode is given, so the result is {_UPSTREAM}"] if static is None else []
        )
    integer, is_static = _MODES[mode], static is None or static.strip().lower() in _TRUE
    overrides: dict[str, Any] = {"method": _METHODS[calib_mode], "method_options": {}}
    if not is_static:
        overrides = {"mode": "dynamic", "dynamic_weight_types": weight_types}
    if is_static and integer == "uint8":
        overrides |= {"mode": "static", "format": "QOperator", "activation_type": "uint8", "weight_type": "uint8"}
        # These are the choices of the 2019 tool. edgeq's profiles would choose others.
        overrides |= {"activation_symmetric": False, "weight_symmetric": False}
        overrides |= {"per_channel": False, "reduce_range": False}
    if op_types:
        overrides["op_types"] = tuple(_listed(op_types))
    excluded = [*_listed(black_nodes), *_excluded_nodes(model_path, _listed(white_nodes))]
    if excluded:
        overrides["exclude"] = tuple(excluded)
    preprocess: Any
    if data_preprocess is None:
        preprocess = images_or_arrays(dataset_path, RESNET50)
        assumed += [f"note: no --data_preprocess is given; using --data_preprocess={preprocess}"] if preprocess else []
    else:
        preprocess = _preprocess(data_preprocess, model_path)
    data = Data(dataset_path, preprocess, count=dataset_size or None)
    # Static int8 existed only in the fork, whose runtime drives the array.
    write = _for_the_array if is_static and integer == "int8" else _for_cpus
    return [write(model_path, data, output_model_path, overrides), *assumed]


def _preprocess(text: str, model: Path) -> Any:
    """Return the value of `--data_preprocess` in a form that `load_preprocess` accepts."""
    if text in _PREPROCESS:
        return _PREPROCESS[text]
    if ".py:" in text:
        return own_preprocess(text, model)
    # A bare name is a function in a file of the user's, so the file must be named too.
    if text.isidentifier():
        raise UsageError(
            f"no --data_preprocess is called {text!r}",
            f"Give --data_preprocess=data_preprocess.py:{text} for a function in a file of yours, or one of "
            f"{', '.join(_PREPROCESS)}",
        )
    return text


def _for_cpus(model: Path, data: Data, output: Path, overrides: Mapping[str, Any]) -> str:

    result = job.quantize(model, data, output, overrides=overrides, timed=False, effort=None, force=True)
    scheme = result.scheme
    weights = " and ".join(sorted(set(scheme.dynamic_weight_types.values())))
    return f"{output}: {scheme.title if scheme.mode == 'static' else f'{scheme.mode}, weights {weights}'}"


def _for_the_array(model: Path, data: Data, output: Path, overrides: Mapping[str, Any]) -> str:
    """Write two models and a program, and return the lines to print.

    The model at `output` is for the fork's runtime. The model for stock ONNX Runtime and the array's program go next to
    it.
    """
    # Three files are written, and none of them may replace the model or the data.
    check_apart(output, [*model_files(model), Path(data.source)])
    with output_file(output, force=True, ours=belongs_to_program) as draft:
        host_model = draft.with_name(f"{draft.stem}.host.onnx")
        result = job.quantize(model, data, host_model, target=_ARRAY, overrides=overrides, timed=False, effort=None)
        dialect = host_model.with_name(f"{host_model.stem}.dialect.onnx")
        # The model is quantized, but not for the fork. Its reason is among the notes.
        if not dialect.exists():
            why = next(
                (note for note in result.notes if note.startswith("no file for ")), "no file for the fork was written"
            )
            raise ModelError(f"{model}: {why}", "Quantize it with `edgeq quantize`, or leave out the named nodes")
        dialect.replace(draft)
    notes = "".join(f"\nnote: {note}" for note in result.notes)
    return (
        f"{output}: for onnxruntime-riscv; {output.with_name(host_model.name)}: the same for stock ONNX Runtime{notes}"
    )


def _listed(text: str | None) -> Sequence[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _excluded_nodes(model_path: Path, quantized: Sequence[str]) -> Sequence[str]:
    """Return the names of all nodes except `quantized`. Return an empty list if `quantized` is empty."""
    if not quantized:
        return []

    names = [node.name for node in read_model(model_path).graph if node.name]
    # A misspelt name would leave the whole model in float.
    unknown = sorted(set(quantized) - set(names))
    if unknown:
        raise UsageError(f"{model_path} has no node {unknown[0]!r}", "`edgeq inspect` lists the nodes")
    return [name for name in names if name not in quantized]


def __getattr__(name: str) -> Any:
    return find(name, "calibrate")


if __name__ == "__main__":
    run_program(command)
else:
    make_callable(__name__, "edgeq.compat.calibrators:calibrate")
