"""Run ONNX Runtime's `transformers.optimizer` and check its result: python -m edgeq.compat.optimizer, or the function
`optimize_model`.

ONNX Runtime does the fusions, and all its options are accepted. Before the command writes the result, it checks that
the result loads and gives the same outputs as the original model.

    python -m edgeq.compat.optimizer --input bert.onnx --output bert.opt.onnx --model_type bert
    quantize_dynamic("bert.opt.onnx", "bert.int8.onnx", op_types_to_quantize=["Attention", "MatMul", ...])
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import onnx
from edgeq_device.system.places import scratch_folder

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS, ArgumentParser
from edgeq.compat._printing import PrintedProgress, say
from edgeq.compat.preprocess import quant_pre_process
from edgeq.compat.source import as_file
from edgeq.data.samples import open_samples
from edgeq.errors import CheckFailedError, DataError, ModelError, RuntimeUnavailableError, UsageError, one_line
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.files import data_names, model_files
from edgeq.model.load import load_model, model_signature, read_model, save_model
from edgeq.model.names import name_nodes
from edgeq.quantization.quantizer import quiet
from edgeq.retargeting.compare import made_up_inputs
from edgeq.run.session import open_session
from edgeq.tuning.recover.fuse_attention import split_unsqueezes
from edgeq.util.display import SILENT, Progress
from edgeq.util.outputs import check_apart, output_file

LEAST_SQNR_DB = 40.0
"""The minimum SQNR of the outputs in dB. Outputs need not be identical, because fused operators add in a different
order and may approximate Gelu differently.
"""
# float16 has 11 significant bits, and a transformer adds up many rounded products.
_HALF_SQNR_DB = 25.0
_SIZE = 8
"""The size of every free axis in the generated inputs."""


def optimize_model(input: str | Path | onnx.ModelProto, model_type: str = "bert", **options: Any) -> Any:
    """Run `onnxruntime.transformers.optimizer.optimize_model` with its arguments and return its `OnnxModel`.

    onnxruntime's optimizer needs PyTorch to run ONNX Runtime's own optimisation. If PyTorch is not installed, edgeq
    itself runs the basic level of that optimisation, which works without PyTorch. Before the fusions, edgeq splits each
    Unsqueeze of several axes, because otherwise the optimizer does not recognise an attention mask.

    Raises:
        ModelError: the model is damaged, or the optimizer fails on it.
        UsageError: the installed onnxruntime does not support an option.
        RuntimeUnavailableError: the options need PyTorch.
    """
    with scratch_folder("edgeq-optimizer-") as folder:
        path = as_file(input, Path(folder))
        # A damaged model should fail with edgeq's own error, not inside the optimizer.
        read_model(path)
        source, level = _prepared(path, model_type, options.get("opt_level"), Path(folder))
        with _failures(path), quiet():
            from onnxruntime.transformers.optimizer import optimize_model as theirs

            return theirs(str(source), model_type, **{**options, "opt_level": level})


def _prepared(path: Path, model_type: str, level: int | None, folder: Path) -> tuple[Path, int | None]:
    """Return the model and the level to pass to onnxruntime's optimizer. The masks have the form that the optimizer
    recognises. If the basic level is wanted but PyTorch is not installed, edgeq has already run that level, and the
    returned level is 0.
    """
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    if model_type not in MODEL_TYPES:
        raise UsageError(f"unknown model type {model_type!r}", f"Known: {', '.join(sorted(MODEL_TYPES))}")
    target_level = MODEL_TYPES[model_type][2] if level is None else level
    # Only ONNX Runtime's own optimisation needs PyTorch, and edgeq replaces no more than its basic level.
    if target_level > 1 and find_spec("torch") is None:
        raise RuntimeUnavailableError(
            f"onnxruntime's optimizer needs torch for level {target_level}", "pip install torch, or use level 0 or 1"
        )
    if target_level == 1 and find_spec("torch") is None:
        basic = folder / "basic.onnx"
        quant_pre_process(path, basic, skip_symbolic_shape=True, skip_onnx_shape=True)
        path, level = basic, 0
    model = read_model(path)
    # The optimizer refers to nodes by their names.
    name_nodes(model)
    if split_unsqueezes(model):
        save_model(model, folder / "split.onnx")
        path = folder / "split.onnx"
    return path, level


@contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Turn the exceptions of onnxruntime's optimizer into edgeq's errors."""
    try:
        yield
    except TypeError as error:
        raise UsageError(f"onnxruntime's optimizer: {one_line(error)}", "See onnxruntime's documentation") from error
    except (ValueError, RuntimeError, AssertionError, KeyError, IndexError) as error:
        raise ModelError(
            f"{path}: onnxruntime's optimizer fails: {one_line(error)}", "Try another model type"
        ) from error


def check_same(
    original: Path, optimized: Path, *, least_sqnr_db: float = LEAST_SQNR_DB, progress: Progress = SILENT
) -> None:
    """Compare the outputs of an optimised model with those of the original model on a generated input.

    The models are not compared if their inputs differ (`--input_int32`) or if the original does not accept generated
    values. A note then states this.

    Raises:
        ModelError: the optimised model does not load.
        CheckFailedError: the outputs differ.
    """
    # This tells a damaged file from one that this machine's provider cannot run.
    load_model(optimized, external_data="none")
    try:
        sessions = {"before": open_session(original), "after": open_session(optimized)}
    except RuntimeUnavailableError as error:
        raise ModelError(error.problem, "Run it on the provider that it was optimised for") from error
    signature = model_signature(original)
    # `--input_int32` changes the types of the inputs, so one feed does not fit both models.
    if signature.inputs != model_signature(optimized).inputs:
        progress.note("not compared with the original model: the inputs differ")
        return

    feed = made_up_inputs(original, seed=0, free=_SIZE)
    try:
        agreement = evaluate_sessions(sessions, open_samples([feed], signature), reference="before").agreement["after"]
    except (DataError, RuntimeUnavailableError) as error:
        progress.note(f"not compared with the original model: it refuses generated inputs ({error.problem})")
        return
    if not agreement.compared and not any(output.mismatched for output in agreement.outputs):
        progress.note("not compared with the original model: its outputs are not numbers")
        return
    if agreement.sqnr_db < least_sqnr_db or any(output.nonfinite or output.mismatched for output in agreement.outputs):
        raise CheckFailedError(
            f"the optimised model gives other outputs ({agreement.sqnr_db:.1f} dB)", "Disable fusions until they agree"
        )
    progress.note(f"same outputs as before: {agreement.sqnr_db:.0f} dB")


@click.command("optimizer", cls=OneLineCommand, context_settings={**SETTINGS, "ignore_unknown_options": True})
@click.option("--input", "source", type=click.Path(path_type=Path), required=True, help="Float model.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Result; replaced if it exists.")
@click.argument("extra_arguments", nargs=-1, type=click.UNPROCESSED)
def command(source: Path, output: Path, extra_arguments: tuple[str, ...]) -> None:
    """Fuse the operators of a transformer. All other options are those of onnxruntime.transformers.optimizer."""
    say(run(source, output, extra_arguments, progress=PrintedProgress()))


def run(source: Path, output: Path, extra_arguments: Sequence[str], *, progress: Progress = SILENT) -> str:
    """Run the command with these options and return the line to print."""
    # Only the nodes are counted below, so the weights need not be read.
    original = load_model(source, external_data="none")
    check_apart(output, model_files(source))
    with (
        scratch_folder("edgeq-optimizer-") as folder,
        output_file(output, force=True, beside=data_names(output, source)) as draft,
    ):
        # Two options must be known here. All of them go to onnxruntime's own parser unchanged.
        option_parser = ArgumentParser("edgeq.compat.optimizer", add_help=False, allow_abbrev=False)
        option_parser.add_argument("--opt_level", type=int)
        option_parser.add_argument("--model_type", default="bert")
        options = option_parser.parse_known_args(extra_arguments)[0]
        start, level = _prepared(source, options.model_type, options.opt_level, Path(folder))
        _theirs(start, draft, extra_arguments if level is None else [*extra_arguments, "--opt_level", str(level)])
        if not draft.is_file():
            raise ModelError(f"{source}: onnxruntime's optimizer wrote nothing", "Try another --model_type")
        min_sqnr_db = _HALF_SQNR_DB if "--float16" in extra_arguments else LEAST_SQNR_DB
        check_same(source, draft, least_sqnr_db=min_sqnr_db, progress=progress)
        fused = load_model(draft, external_data="none")
    counts = Counter(node.op_type for node in fused.graph.node if node.domain == "com.microsoft")
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "nothing"
    return f"{output}: {len(original.graph.node)} nodes → {len(fused.graph.node)}; fused: {listed}"


def _theirs(source: Path, draft: Path, extra_arguments: Sequence[str]) -> None:
    """Run onnxruntime's own command in this process. The command parses its options itself."""
    # onnxruntime's command reads its options from sys.argv, so they are put there and restored after it.
    arguments = sys.argv
    sys.argv = ["optimizer", "--input", str(source), "--output", str(draft), *extra_arguments]
    try:
        with _failures(source), quiet():
            from onnxruntime.transformers.optimizer import main

            main()
    except SystemExit as error:
        if error.code:
            raise UsageError("onnxruntime's optimizer refuses an option", "See the lines above") from None
    finally:
        sys.argv = arguments


if __name__ == "__main__":
    run_program(command)
