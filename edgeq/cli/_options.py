"""Define options that several commands have in common."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from edgeq_device.errors import DeviceError
from edgeq_device.options import MOST_THREADS

from edgeq.errors import UsageError
from edgeq.util.registry import DECODERS, METHODS, RECOVERIES, TASKS

if TYPE_CHECKING:
    from edgeq.remote.devices import Board
    from edgeq.run.engines import EngineChoice

F = TypeVar("F", bound=Callable[..., Any])


class Renamed(click.Option):
    """Define an option that still accepts its earlier names without showing them.

    Args:
        before: those names.
    """

    def __init__(self, declarations: Sequence[str], *, before: Sequence[str], **attributes: Any) -> None:
        super().__init__([*declarations, *before], **attributes)
        self.before = frozenset(before)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return what `--help` shows of it."""
        shown = copy.copy(self)
        shown.opts = [name for name in self.opts if name not in self.before]
        return super(Renamed, shown).get_help_record(ctx)


def complete_target(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the shipped targets and profiles with `incomplete` anywhere in their names, for the shell."""
    from edgeq.util.registry import shipped

    del ctx, parameter
    names = {file.stem for folder in ("targets", "profiles") for file in shipped(folder).glob("*.toml")}
    return sorted(name for name in names if incomplete.lower() in name)


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return what the shell completes a value from: `names` that begin with what was typed, or files for a path."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        del ctx, parameter
        found: list[Any] = sorted(name for name in names() if name.startswith(incomplete))
        return found or [CompletionItem(incomplete, type="file")]

    return complete


def _preprocessings() -> Iterable[str]:
    from edgeq.data.preprocess import names

    return names()


COMPLETE_RECOVERY = _completing(RECOVERIES.names)
COMPLETE_TASK, _COMPLETE_DECODER = _completing(TASKS.names), _completing(DECODERS.names)
_COMPLETE_PREPROCESS = _completing(_preprocessings)


def target_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Return `-t/--target`, which names a target or a profile; the shell completes it."""
    attributes = {"shell_complete": complete_target, "metavar": "NAME", **attributes}
    return click.option("-t", "--target", *names, cls=Renamed, before=["--profile"], **attributes)


def complete_board(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the devices files that begin with `incomplete`, for the shell."""
    from edgeq.remote.devices import known_boards

    del ctx, parameter
    return sorted(name for name in known_boards() if name.startswith(incomplete))


def on_board(function: F) -> F:
    """Return `--on`, which names one board."""
    return click.option(
        "--on",
        metavar="BOARD",
        shell_complete=complete_board,
        help="Do it on this board: ssh://user@host[:port], or a name of devices.toml.",
    )(function)


def board_of(name: str) -> Board:
    """Return the board that `--on` names."""
    from edgeq.remote.devices import one_board

    return one_board(name)


def engines_of(texts: Sequence[str]) -> list[EngineChoice]:
    """Return the engines that `--engine` names."""
    from edgeq.run.engines import choose_engine

    return list({choice.name: choice for choice in map(choose_engine, texts)}.values())


def _checked_workers(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Return `given` as it is, checked before anything is read."""
    if given is not None:
        from edgeq.distributed.workers import check_workers

        try:
            check_workers(given)
        except UsageError as error:
            raise click.BadParameter(str(error), context, parameter) from error
    return given


def checked_reference(context: click.Context, parameter: click.Parameter, given: str) -> str:
    """Return `given` unchanged, refused where it is not a place in a registry, before a recipe or anything else
    shows it.
    """
    from edgeq_device.registry import parse_reference

    try:
        parse_reference(given)
    except DeviceError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return given


class Output(click.Path):
    """Mark a path that a command writes; `edgeq run` checks where it lies.

    Args:
        written: tells by the command's parameters whether it is written; without it, always.
    """

    def __init__(self, written: Callable[[Mapping[str, Any]], bool] = lambda given: True) -> None:
        super().__init__(path_type=Path, readable=False)
        self.written = written


# The package that reads a file reports what cannot be read, with its own exit code.
PATH = click.Path(path_type=Path, readable=False)
OUTPUT = Output()
TASK_NAMES = f"{', '.join(TASKS.names())}, or your own: path.py:factory"
INTEGER = click.Choice(["int8", "uint8"])

PREPROCESS = click.option(
    "--preprocess",
    shell_complete=_COMPLETE_PREPROCESS,
    help="Preprocessing: a name or steps (`edgeq preprocess list`), a .toml file, or path.py:function.",
)
OWN_PREPROCESS = click.option(
    "--preprocess",
    shell_complete=_COMPLETE_PREPROCESS,
    help="Preprocessing: a name or steps (`edgeq preprocess list`), or a .toml file. A bundle brings its own.",
)
VARIANT = click.option("--variant", help="Variant of the bundle; else the one that fits this machine.")
START = click.option("--start", type=click.IntRange(min=0), default=0, help="Skip this many samples first.")
STRIDE = click.option("--stride", type=click.IntRange(min=1), default=1, help="Take every N-th sample, for this N.")
THREADS = click.option(
    "--threads",
    type=click.IntRange(0, MOST_THREADS),
    default=0,
    help="Threads inside an operator; 0: all cores.",
)
WORKERS = click.option(
    "--workers",
    callback=_checked_workers,
    metavar="N|ADDRESS",
    help="Share the samples among N processes, or those of a Dask scheduler: tcp://host:8786 (docs/scale.md).",
)
SESSION_OPTIONS = click.option(
    "--session-option",
    "session_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Session option to run a model file with, over its own; a bundle brings its own. Repeatable.",
)
ENGINE_HELP = "What executes the model, as NAME or NAME:PRECISION (openvino:bf16); `edgeq detect` lists engines."
ENGINE = click.option("--engine", metavar="ENGINE", help=ENGINE_HELP)
TRUST = click.option(
    "--trust",
    type=PATH,
    metavar="PATH",
    help="Keys and certificates one of which must have signed it: a file or a folder. [$EDGEQ_TRUST, /etc/edgeq/trust]",
)
REQUIRE_SIGNATURE = click.option(
    "--require-signature", is_flag=True, help="Refuse where no key is trusted, instead of not looking at signatures."
)
FIX = click.option(
    "--fix",
    "fixed",
    multiple=True,
    metavar="NAME=SIZE",
    help="A number for a free size of the inputs, such as N=1, or x:0=1 where it has no name. Repeatable.",
)
FORCE = click.option("--force", is_flag=True, help="Replace what is there.")
WITH_FLOAT = click.option(
    "--with-float", is_flag=True, help="Put the float32 model in, so that the device can time both."
)


def output_beside(
    pattern: str, metavar: str, help_text: str, *, suffix: Callable[[str], str] | None = None
) -> Callable[[F], F]:
    """Add `-o/--output`; without it a command writes next to its model.

    Args:
        pattern: the name of the file, with the model's as {stem}.
        suffix: its suffix for the target that was typed.
    """

    def place(context: click.Context, parameter: click.Parameter, given: Path | None) -> Path | None:
        """Return the place that is given, else the one next to the model."""
        del parameter
        model: Path | None = context.params.get("model")  # None where the shell completes a line without it
        if given or not model:
            return given
        placed = model.parent / pattern.format(stem=model.stem)
        target = context.params.get("target")  # a typed one is read before what nobody typed
        return placed.with_suffix(suffix(target)) if suffix is not None and target else placed

    shown = f"{help_text} [{pattern.format(stem='MODEL')}, next to the model]"
    return click.option("-o", "--output", type=OUTPUT, callback=place, metavar=metavar, help=shown)


_DECODING = (
    click.option(
        "--classes", type=PATH, help="Names in the order of the scores, for class folders and labels: labels.txt, JSON."
    ),
    click.option("--annotations", type=PATH, help="Detection: COCO instances file."),
    click.option(
        "--decoder",
        shell_complete=_COMPLETE_DECODER,
        help=f"Detection: {', '.join(DECODERS.names())}, or your own: path.py:function.",
    ),
    click.option("--class-offset", type=int, help="Classification: scores in front of class 0 (background: 1)."),
    click.option("--confidence", type=float, help="Detection: drop boxes that score at most this. [0.01]"),
    click.option("--iou", type=float, help="Detection: suppress boxes of a class that overlap more than this. [0.65]"),
)


def _task_output(*before: str) -> Callable[[F], F]:
    """`--task-output`, with the names that it had before."""
    help_text = "The model output that the task looks at, where there are several."
    return click.option("--task-output", cls=Renamed, before=before, metavar="NAME", help=help_text)


_DATA = (
    click.option("--data", help="Calibration samples: a folder of images or test_data_set_N, .npz, .npy, .pb."),
    click.option("--val", help="Held-out samples for the proof. Without them it rests on the calibration samples."),
    click.option(
        "--calibration", type=PATH, help="Folder that `edgeq calibrate` wrote, instead of a pass over --data."
    ),
    PREPROCESS,
    click.option("--count", type=click.IntRange(min=1), help="Calibration samples to use, at most."),
    click.option("--labels", help="Where the --val labels are, if not with the data."),
    click.option("--task", shell_complete=COMPLETE_TASK, help=f"What to measure on --val: {TASK_NAMES}."),
    *_DECODING,
    _task_output(),
    FIX,
    WORKERS,
)

_SCHEME = (
    click.option(
        "--method",
        type=click.Choice(METHODS.names()),
        help="How ranges are derived from the calibration.",
    ),
    click.option(
        "--percentile",
        type=click.FloatRange(0, 100, min_open=True),
        help="With --method percentile: share of values kept, such as 99.99.",
    ),
    click.option(
        "--method-option",
        "method_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the method; `edgeq extensions` lists them. Repeatable.",
    ),
    click.option("--per-channel/--no-per-channel", default=None, help="One weight scale per output channel."),
    click.option("--reduce-range/--no-reduce-range", default=None, help="7-bit weights."),
    click.option(
        "--fit-pairs/--no-fit-pairs",
        default=None,
        help="Weights whose neighbours' products fit into 16 bits, as precise as that allows.",
    ),
    click.option("--format", type=click.Choice(["QDQ", "QOperator", "table"]), help="How quantization is written."),
    click.option("--activation-type", type=INTEGER, help="Integers of activations."),
    click.option("--weight-type", type=INTEGER, help="Integers of weights."),
    click.option("--activation-symmetric/--activation-asymmetric", default=None, help="Where 0 lies in activations."),
    click.option(
        "--rest", type=click.Choice(["float32", "float16", "bfloat16"]), help="What is not quantized computes in this."
    ),
    click.option("--dynamic", is_flag=True, help="Measure activation ranges at run time (transformers, RNNs)."),
    click.option(
        "--weight-only",
        type=click.Choice(["8", "4"]),
        metavar="BITS",
        help="Only the weights of matrix products, in blocks of 8 or 4 bits.",
    ),
    click.option(
        "--eight-bit", multiple=True, metavar="NODE", help="8 bits for this node under --weight-only 4. Repeatable."
    ),
    click.option(
        "--block-compute",
        type=click.Choice(["int8", "float32"]),
        help="What products under --weight-only compute in; default: what samples and timings show.",
    ),
    click.option("--op-type", "op_types", multiple=True, help="Quantize only this operator type. Repeatable."),
    click.option("--exclude", multiple=True, metavar="NODE", help="Keep this node in float. Repeatable."),
    click.option(
        "--wide", multiple=True, metavar="NODE", help="16-bit activations for this node, or * for all. Repeatable."
    ),
)

_BARS = (
    click.option(
        "--max-drop",
        metavar="DROP",
        help="Repair where accuracy falls by more [1pt]; fail where that does not help: 0.01, 1% or 1pt. Needs --task.",
    ),
    click.option("--require-coverage", metavar="SHARE", help="Fail if less of the MACs run in int8: 0.95 or 95%."),
    click.option(
        "--effort",
        type=click.Choice(["quick", "default", "thorough"]),
        default="default",
        show_default=True,
        help="What a repair may take where the result falls short of --max-drop, or of 20 dB without labels.",
    ),
    click.option("--as-is", is_flag=True, help="Take the plain build, however far it is from float32."),
    click.option("--no-timing", is_flag=True, help="Do not time int8 against float32."),
    click.option("--no-emulate", is_flag=True, help="Do not run models for other machines on their own kernels."),
    FORCE,
)  # fmt: skip


def data_options(function: F) -> F:
    """Add the options on data."""
    return _added(_with_classes(function), _DATA)


def task_options(*before: str) -> Callable[[F], F]:
    """Add where labels are and how outputs are read for a task: --labels, --annotations, --decoder and so on.

    Args:
        before: earlier names of --task-output.
    """

    def add(function: F) -> F:
        labels = click.option("--labels", help="Where labels come from, if not with the data.")
        return _added(_with_classes(function), (labels, *_DECODING, _task_output(*before)))

    return add


def comparison_options(function: F) -> F:
    """Add what two models are compared on."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--data", help="Samples that both are run on: a folder, .npz, .npy, .pb ..."),
        click.option("--task", shell_complete=COMPLETE_TASK, help=f"What to measure against labels: {TASK_NAMES}."),
        OWN_PREPROCESS,
        task_options(),
        click.option("--count", type=click.IntRange(min=1), help="Samples to use, at most."),
        THREADS,
        SESSION_OPTIONS,
    )
    return _added(function, options)


def comparison_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options`, with those of `comparison_options` as fields of `edgeq.report.compare.CompareRequest`."""
    from edgeq.measure.task import split_task_options
    from edgeq.run.session import given_options

    task, given = split_task_options(options)
    return {**given, "options": task, "session_options": given_options(given["session_options"])}


def build_options(function: F) -> F:
    """Add every option on data, scheme and bars."""
    return _added(_with_classes(function), (*_DATA, *_SCHEME, *_BARS))


def _with_classes(function: F) -> F:
    """Pass what --classes gives on with --labels, as `edgeq.data.labels.Labels`."""

    @functools.wraps(function)
    def passing(*arguments: Any, classes: Path | None, **options: Any) -> None:
        """Call the command."""
        if classes is not None:
            from edgeq.data.labels import Labels

            options["labels"] = Labels(options["labels"], classes)
        function(*arguments, **options)

    return passing  # type: ignore[return-value]


def _added(function: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function
