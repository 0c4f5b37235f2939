"""Run ONNX Runtime's `quantization.preprocess`: python -m edgeq.compat.preprocess, or the function `quant_pre_process`.

The steps are symbolic shape inference, ONNX Runtime's basic optimisation, and onnx's shape inference. Each step can be
skipped. The model keeps its opset, its types, and the names of the nodes and tensors that remain.
docs/migration-tools.md lists the differences from the older tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import onnx
import onnx_ir as ir
from edgeq_device.system.places import scratch_folder

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._names import find
from edgeq.compat._options import SETTINGS, switch
from edgeq.compat._printing import PrintedProgress
from edgeq.compat.source import as_file
from edgeq.errors import ModelError, UsageError
from edgeq.model.clean import tidy
from edgeq.model.convert import external_folder, to_proto
from edgeq.model.external import save_external
from edgeq.model.files import INLINE_LIMIT, data_name, model_files
from edgeq.model.half import widen_half
from edgeq.model.load import check_valid, load_model, read_model, save_model
from edgeq.model.names import name_nodes
from edgeq.model.prepare import normalise, optimize_basic
from edgeq.model.shapes import SymbolicOptions, check_sizes, unknown_shapes, write_shapes
from edgeq.model.tensors import weight_bytes
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, output_file
from edgeq.util.paths import path_of

# Exporters write this number for "to the end" in a Slice.
_INT_MAX = 2**31 - 1


def quant_pre_process(
    input_model: str | Path | onnx.ModelProto | None = None,
    output_model_path: str | Path | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = _INT_MAX,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    *,
    input_model_path: str | Path | None = None,
    progress: Progress = SILENT,
) -> None:
    """Infer shapes and optimise a model to prepare it for quantization.

    Args:
        input_model: a path, or a model in memory (of less than 2 GB).
        output_model_path: path of the result. An existing file and its data files are replaced.
        skip_optimization, skip_onnx_shape, skip_symbolic_shape: True to leave out a step.
        auto_merge: accepted but not used. Sizes that may differ stay distinct, and the inference continues.
        int_max, guess_output_rank, verbose: see `edgeq.model.shapes.SymbolicOptions`.
        save_as_external_data: True to write weights to files next to the model. A model that is too large for one file
            is always saved this way.
        all_tensors_to_one_file: True for one data file, False for a file per tensor.
        external_data_location: the name of the data file. The default is "<output>.data".
        external_data_size_threshold: the smallest size in bytes of a weight that is written to a data file.
        input_model_path: the earlier name of `input_model`, until 2023.

    Raises:
        UsageError: the arguments contradict each other, or a path is missing.
        ModelError: the model is damaged, or onnxruntime does not accept it.
        OutputError: the output cannot be written.
    """
    # The argument was renamed in 2023, and scripts with either name run.
    source = input_model if input_model is not None else input_model_path
    if source is None or output_model_path is None:
        raise UsageError("the model or the path of the result is missing", "Give input_model and output_model_path")
    symbolic = None if skip_symbolic_shape else SymbolicOptions(int_max, guess_output_rank, verbose)
    output = path_of(output_model_path, "output")
    with scratch_folder("edgeq-preprocess-") as folder:
        path = as_file(source, Path(folder))
        model = preprocessed(
            path,
            Path(folder),
            symbolic=symbolic,
            optimize=not skip_optimization,
            onnx_shapes=not skip_onnx_shape,
            progress=progress,
        )
        write(
            model,
            output,
            source=path,
            save_as_external_data=save_as_external_data,
            all_tensors_to_one_file=all_tensors_to_one_file,
            external_data_location=external_data_location,
            external_data_size_threshold=external_data_size_threshold,
        )


def load_model_with_shape_infer(model_path: str | Path) -> onnx.ModelProto:
    """Load a model with its weights and the shapes of its tensors.

    Raises:
        ModelError: the file cannot be read, or is damaged.
    """
    with scratch_folder("edgeq-shapes-") as folder:
        inferred = Path(folder) / "model.onnx"
        # Only onnx's own inference runs: the function promises shapes, not an optimised model.
        quant_pre_process(Path(model_path), inferred, skip_optimization=True, skip_symbolic_shape=True)
        return load_model(inferred, external_data="all")


def preprocessed(
    path: Path,
    workdir: Path,
    *,
    symbolic: SymbolicOptions | None,
    optimize: bool,
    onnx_shapes: bool,
    progress: Progress = SILENT,
) -> ir.Model:
    """Return the model after the chosen steps.

    Args:
        path: the model.
        workdir: the folder for temporary files of the optimisation. The result may refer to external data in it.
        symbolic: the options of symbolic shape inference, or None to skip it.
        optimize: True to run ONNX Runtime's basic optimisation.
        onnx_shapes: True to run onnx's shape inference.

    Raises:
        ModelError: the model is damaged, or onnxruntime does not accept it.
    """
    model = read_model(path)
    # A damaged size is refused here, before the inferences compute with it.
    check_sizes(model, path)
    # Later steps refer to nodes by name, and so do the user's lists for the quantizer.
    named = name_nodes(model)
    if named:
        progress.note(f"{named} nodes without a name got one")
    if symbolic is not None:
        _describe(model, symbolic, progress)
    if optimize:
        model = _optimized(model, path, workdir, progress)
    if onnx_shapes:
        _describe(model, None, progress)
    # Infer again, because optimisation creates tensors that the first inference did not see.
    if optimize and symbolic is not None and unknown_shapes(model):
        _describe(model, symbolic, progress)
    _check(model, path)
    return model


def write(
    model: ir.Model,
    output: Path,
    *,
    source: Path,
    save_as_external_data: bool,
    all_tensors_to_one_file: bool,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
) -> None:
    """Write a model in one step and replace an existing one.

    Args:
        source: the model file. Neither it nor its data may be replaced.
        Other arguments: see `quant_pre_process`.
    """
    # The source may have its weights next to it, so more than one file must not be replaced.
    protected = model_files(source)
    check_apart(output, protected)
    folder = external_folder(model)
    with output_file(output, force=True) as draft:
        if save_as_external_data:
            save_external(
                to_proto(model),
                draft,
                origin=source if folder == source.parent.absolute() else (folder or draft.parent) / source.name,
                location=(external_data_location or data_name(output)) if all_tensors_to_one_file else None,
                threshold=external_data_size_threshold,
            )
        else:
            save_model(model, draft)
        # The names of the data files are known only after writing.
        for file in draft.parent.iterdir():
            check_apart(output.parent / file.name, protected)


def _describe(model: ir.Model, symbolic: SymbolicOptions | None, progress: Progress) -> None:
    """Write inferred shapes into the model, in place."""
    inference_problem = write_shapes(model, symbolic)
    if inference_problem:
        progress.note(f"symbolic shape inference failed ({inference_problem}); onnx's own was used")


def _optimized(model: ir.Model, source: Path, workdir: Path, progress: Progress) -> ir.Model:
    """Widen 16-bit floats to float32, then run ONNX Runtime's basic optimisation. On a CPU, ONNX Runtime computes
    16-bit floats in float32 and would otherwise leave a Cast after every weight.
    """
    tidy(model)
    widened = widen_half(model)
    if widened:
        progress.note(f"16-bit floats widened to float32 ({widened} weights): int8 is made from float32")
    raw, optimized = workdir / "raw.onnx", workdir / "optimized.onnx"
    save_model(model, raw)
    # A model above the limit of one protobuf needs its weights in a file of their own here too.
    optimize_basic(raw, optimized, source=source, external=weight_bytes(model) > INLINE_LIMIT)
    result = ir.load(optimized)
    # ONNX Runtime leaves out the producer and the metadata, and lists the weights in the order of a hash table.
    normalise(result, model)
    return result


def _check(model: ir.Model, path: Path) -> None:

    try:
        check_valid(to_proto(model), path)
    except ModelError as error:
        raise ModelError(f"{error.problem} (after preprocessing)", "Skip a step, and report this model") from error


def symbolic_options(function: Any) -> Any:
    """Add the options of symbolic shape inference to a command. Two commands share them."""
    for option in (
        switch("--auto_merge", help="Accepted and ignored: sizes that may differ stay distinct."),
        click.option("--int_max", type=int, default=_INT_MAX, help='Integers this large mean "to the end" (Slice).'),
        switch("--guess_output_rank", help="Give unknown operators the rank of their first input."),
        click.option("--verbose", type=click.IntRange(0, 3), default=0, help="0: quiet, 1: warnings, 3: all."),
        switch("--save_as_external_data", help="Write weights to files next to the model."),
        switch("--all_tensors_to_one_file", help="Write weights to one file, not to a file per weight."),
        click.option("--external_data_location", help="Name of the one file with weights."),
        click.option(
            "--external_data_size_threshold",
            type=click.IntRange(min=0),
            default=1024,
            help="Smallest size in bytes of a weight that is written next to the model.",
        ),
    ):
        function = option(function)
    return function


@click.command("preprocess", cls=OneLineCommand, context_settings=SETTINGS)
@click.option("--input", "input_model", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--output", "output_model_path", type=click.Path(path_type=Path), required=True, help="Result.")
@switch("--skip_optimization", help="Leave out ONNX Runtime's optimisation.")
@switch("--skip_onnx_shape", help="Leave out onnx's shape inference.")
@switch("--skip_symbolic_shape", help="Leave out symbolic shape inference.")
@symbolic_options
def command(**options: Any) -> None:
    """Optimise a model and infer its shapes to prepare it for quantization."""
    quant_pre_process(**options, progress=PrintedProgress())


def __getattr__(name: str) -> Any:
    return find(name, "preprocess")


if __name__ == "__main__":
    run_program(command)
