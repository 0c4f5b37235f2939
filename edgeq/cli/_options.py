"""Define the options that several commands share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from edgeq_device.engines.session_options import MOST_THREADS
from edgeq_device.errors import DeviceError

from edgeq.arguments import as_options
from edgeq.cli._checked_text import DECODER, DROP, ENGINE_NAME, HEAD, PREPROCESS_NAME, SOURCE, TARGET, TASK, CheckedText
from edgeq.errors import UsageError
from edgeq.util.outputs import default_output
from edgeq.util.registry import DECODERS, METHODS, RECOVERIES, TASKS

if TYPE_CHECKING:
    from edgeq.remote.devices import Board
    from edgeq.run.engines import EngineChoice

F = TypeVar("F", bound=Callable[..., Any])


class Renamed(click.Option):
    """Define an option that still accepts its earlier names, which the help does not show.

    Args:
        before: the earlier names.
    """

    def __init__(self, declarations: Sequence[str], *, before: Sequence[str], **attributes: Any) -> None:
        super().__init__([*declarations, *before], **attributes)
        self.before = frozenset(before)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's line in `--help`, without its earlier names."""
        current = copy.copy(self)
        current.opts = [name for name in self.opts if name not in self.before]
        return super(Renamed, current).get_help_record(ctx)


def complete_target(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the shipped targets and profiles that contain `incomplete`, for shell completion."""
    from edgeq.util.folders import shipped

    del ctx, parameter
    names = {file.stem for folder in ("targets", "profiles") for file in shipped(folder).glob("*.toml")}
    return sorted(name for name in names if incomplete.lower() in name)


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a shell completion function for a value. It offers the `names` that begin with the typed text. If no name
    matches, it offers files.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        del ctx, parameter
        matches: list[Any] = sorted(name for name in names() if name.startswith(incomplete))
        return matches or [CompletionItem(incomplete, type="file")]

    return complete


def _preprocessings() -> Iterable[str]:
    from edgeq.data.preprocess import names

    return names()


COMPLETE_RECOVERY = _completing(RECOVERIES.names)
COMPLETE_TASK, _COMPLETE_DECODER = _completing(TASKS.names), _completing(DECODERS.names)
_COMPLETE_PREPROCESS = _completing(_preprocessings)


def target_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Return the option `-t/--target`, which takes a target or a profile and has shell completion."""
    attributes = {"type": TARGET, "shell_complete": complete_target, "metavar": "NAME", **attributes}
    return click.option("-t", "--target", *names, cls=Renamed, before=["--profile"], **attributes)


def complete_board(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of boards that begin with `incomplete`, for shell completion. The boards are those in the
    devices files.
    """
    from edgeq.remote.devices import load_boards

    del ctx, parameter
    return sorted(name for name in load_boards() if name.startswith(incomplete))


def on_board(function: F) -> F:
    """Add the option `--on`, which names one board."""
    return click.option(
        "--on",
        type=CheckedText(board_of),
        metavar="BOARD",
        shell_complete=complete_board,
        help="Run the command on this board: ssh://user@host[:port], or a name from devices.toml.",
    )(function)


def board_of(name: str) -> Board:
    """Return the board that `--on` names."""
    from edgeq.remote.devices import find_board

    return find_board(name)


def engines_of(texts: Sequence[str]) -> list[EngineChoice]:
    """Return the engines that `--engine` names."""
    from edgeq.run.engines import choose_engine

    return list({choice.name: choice for choice in map(choose_engine, texts)}.values())


def _checked_workers(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Check the value of --workers before the command reads anything, and return it unchanged.

    Raises:
        BadParameter: the value is neither a number of processes nor an address.
    """
    if text is not None:
        from edgeq.distributed.workers import check_workers

        try:
            check_workers(text)
        except UsageError as error:
            raise click.BadParameter(as_options(error.text), context, parameter) from error
    return text


def checked_reference(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """Check that `text` is an OCI registry reference, and return it unchanged.

    This check runs before any recipe or message shows the reference.

    Raises:
        BadParameter: `text` is not a reference.
    """
    from edgeq_device.trust.registry import parse_reference

    try:
        parse_reference(text)
    except DeviceError as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return text


class OutputPath(click.Path):
    """Mark a path that a command writes. `edgeq run` checks whether a recipe may write to this path.

    Args:
        written: function that takes the command's parameters and returns whether the command writes the path. By
            default, the command always writes it.
        replaced: function that takes the command's parameters and returns whether the command accepts an existing
            output even without --force.
    """

    def __init__(
        self,
        written: Callable[[Mapping[str, Any]], bool] = lambda given: True,
        *,
        replaced: Callable[[Mapping[str, Any]], bool] = lambda given: False,
    ) -> None:
        super().__init__(path_type=Path, readable=False)
        self.written, self.replaced = written, replaced


class InputPath(click.Path):
    """Mark a path that a command reads.

    click does not check that the file can be read. The package that reads it reports such errors with its own exit
    code.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path, readable=False)

    def check(self, path: Path) -> None:
        """Refuse a path that does not exist. `edgeq run` checks all of a recipe's paths before the first command.

        Raises:
            UsageError: the path does not exist.
        """
        if not path.exists():
            raise UsageError(f"{path} does not exist", "Correct the path")


PATH = InputPath()
OUTPUT = OutputPath()
TASK_NAMES = f"{', '.join(TASKS.names())}, or your own: path.py:factory"
INTEGER = click.Choice(["int8", "uint8"])

PREPROCESS = click.option(
    "--preprocess",
    type=PREPROCESS_NAME,
    shell_complete=_COMPLETE_PREPROCESS,
    help="Preprocessing of the samples: a name or steps (`edgeq preprocess list`), a .toml file, or path.py:function.",
)
OWN_PREPROCESS = click.option(
    "--preprocess",
    type=PREPROCESS_NAME,
    shell_complete=_COMPLETE_PREPROCESS,
    help="Preprocessing of the samples: a name or steps (`edgeq preprocess list`), or a .toml file. [default: the "
    "bundle's]",
)
VARIANT = click.option("--variant", help="Variant of the bundle. [default: the one that fits this machine]")
START = click.option(
    "--start", type=click.IntRange(min=0), default=0, help="Skip this many samples at the start. [default: 0]"
)
STRIDE = click.option(
    "--stride",
    type=click.IntRange(min=1),
    default=1,
    help="Step between the samples: 10 uses every tenth sample. [default: 1]",
)
THREADS = click.option(
    "--threads",
    type=click.IntRange(0, MOST_THREADS),
    default=0,
    help="Threads within an operator. 0 uses all cores. [default: 0]",
)
WORKERS = click.option(
    "--workers",
    callback=_checked_workers,
    metavar="N|ADDRESS",
    help="Distribute the samples over N processes, or over the workers of a Dask scheduler, such as tcp://host:8786 "
    "(docs/scale.md).",
)
SESSION_OPTIONS = click.option(
    "--session-option",
    "session_options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a session option for a model file. It overrides the option stored in the file. Bundles keep their own "
    "options. Repeatable.",
)
ENGINE_HELP = "Engine that runs the model: NAME or NAME:PRECISION, such as openvino:bf16. `edgeq detect` lists engines."
ENGINE = click.option("--engine", type=ENGINE_NAME, metavar="ENGINE", help=ENGINE_HELP)
TRUST = click.option(
    "--trust",
    type=PATH,
    metavar="PATH",
    help="Trusted keys and certificates: a file or a folder. One of them must have signed the bundle. [default: "
    "$EDGEQ_TRUST, else /etc/edgeq/trust]",
)
REQUIRE_SIGNATURE = click.option(
    "--require-signature",
    is_flag=True,
    help="Refuse the bundle if no trusted key is set, instead of skipping the check of the signature.",
)
FIX = click.option(
    "--fix",
    "fixed",
    multiple=True,
    metavar="NAME=SIZE",
    help="Fix a free size of the inputs: N=1, or x:0=1 (input:axis) if the size has no name. Repeatable.",
)
FORCE = click.option("--force", is_flag=True, help="Replace an existing output.")
WITH_FLOAT = click.option(
    "--with-float", is_flag=True, help="Include the float32 model, so that the device can time both models."
)


def output_beside(
    ending: str, metavar: str, help_text: str, *, suffix: Callable[[str], str] | None = None
) -> Callable[[F], F]:
    """Add `-o/--output`. Without the option, the command writes its output next to the model.

    Args:
        ending: text that is appended to the model's name, such as ".int8.onnx".
        suffix: function that returns the suffix of the output for the target that the user typed.
    """

    def place(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
        """Return the given path. If no path is given, return the default path next to the model."""
        del parameter
        # the model is None while the shell completes a line without one
        model: Path | None = context.params.get("model")
        if path or not model:
            return path
        placed = default_output(model, ending)
        # a typed target is known here, because click handles typed options before others
        target = context.params.get("target")
        return placed.with_suffix(suffix(target)) if suffix is not None and target else placed

    help_line = f"{help_text} [default: MODEL{ending}, next to the model]"
    return click.option("-o", "--output", type=OUTPUT, callback=place, metavar=metavar, help=help_line)


_DECODING = (
    click.option(
        "--classes",
        type=PATH,
        help="File with the class names in the order of the scores (labels.txt or JSON). It maps class folders and "
        "text labels to class numbers.",
    ),
    click.option("--annotations", type=PATH, help="Detection: annotations in a COCO instances file."),
    click.option(
        "--decoder",
        type=DECODER,
        shell_complete=_COMPLETE_DECODER,
        help=f"Detection: decoder of the outputs: {', '.join(DECODERS.names())}, or your own: path.py:function.",
    ),
    click.option(
        "--class-offset",
        type=int,
        help="Classification: number of scores before class 0, such as 1 for a background class.",
    ),
    click.option("--confidence", type=float, help="Detection: drop boxes whose score is at most this. [default: 0.01]"),
    click.option(
        "--iou",
        type=float,
        help="Detection: suppress boxes of one class that overlap by more than this IoU. [default: 0.65]",
    ),
)


def _task_output(*former: str) -> Callable[[F], F]:
    """Add `--task-output`, which also accepts the earlier names `former`."""
    help_text = "Model output that the task reads, if the model has several."
    return click.option("--task-output", cls=Renamed, before=former, metavar="NAME", help=help_text)


_DATA = (
    click.option(
        "--data",
        type=SOURCE,
        help="Calibration samples: a folder of images or of test_data_set_N folders, or an .npz, .npy or .pb file.",
    ),
    click.option(
        "--val",
        type=SOURCE,
        help="Held-out samples for the proof. [default: a quarter of --data if it has 64 samples or more, else --data]",
    ),
    click.option(
        "--statistics",
        "statistics",
        cls=Renamed,
        before=["--calibration"],
        type=PATH,
        help="Folder with statistics from `edgeq calibrate`, to use instead of a pass over --data.",
    ),
    PREPROCESS,
    click.option("--count", type=click.IntRange(min=1), help="Use at most this many calibration samples."),
    click.option("--labels", help="Labels of the --val samples, if they are not stored with the samples."),
    click.option(
        "--task",
        type=TASK,
        shell_complete=COMPLETE_TASK,
        help=f"Task for measuring accuracy on --val: {TASK_NAMES}.",
    ),
    click.option(
        "--head",
        type=HEAD,
        metavar="NAME[:KEY=VALUE,…]",
        help="What the outputs mean, such as yolov8 or ctc:blank=last; none keeps raw outputs. [default: found]",
    ),
    click.option(
        "--threshold",
        metavar="SCORE",
        help="Score from which an answer counts; float-recall: that with float32's recall. [default: the head's]",
    ),
    click.option(
        "--cut-head",
        is_flag=True,
        help="End the graph before boxes and scores are joined or selected. The runner does the rest.",
    ),
    *_DECODING,
    _task_output(),
    FIX,
    WORKERS,
)

_SCHEME = (
    click.option(
        "--method",
        type=click.Choice(METHODS.names()),
        help="Calibration method, which derives ranges from the statistics. [default: the profile's]",
    ),
    click.option(
        "--percentile",
        type=click.FloatRange(0, 100, min_open=True),
        help="Percentage of the values that a range contains, such as 99.99. Needs --method percentile.",
    ),
    click.option(
        "--method-option",
        "method_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set an option of the method. `edgeq extensions` lists them. Repeatable.",
    ),
    click.option(
        "--per-channel/--no-per-channel",
        default=None,
        help="Use one weight scale per output channel. [default: the profile's]",
    ),
    click.option("--reduce-range/--no-reduce-range", default=None, help="Use 7-bit weights. [default: the profile's]"),
    click.option(
        "--fit-pairs/--no-fit-pairs",
        default=None,
        help="Keep 8-bit weights, with scales just large enough that sums of two neighbouring products fit into 16 "
        "bits. [default: the profile's]",
    ),
    click.option(
        "--format",
        type=click.Choice(["QDQ", "QOperator", "table"]),
        help="Format in which quantization is written. [default: the profile's]",
    ),
    click.option("--activation-type", type=INTEGER, help="Integer type of activations. [default: the profile's]"),
    click.option("--weight-type", type=INTEGER, help="Integer type of weights. [default: the profile's]"),
    click.option(
        "--activation-symmetric/--activation-asymmetric",
        default=None,
        help="Center activation ranges on zero, or fit them to the values. [default: the profile's]",
    ),
    click.option(
        "--rest",
        type=click.Choice(["float32", "float16", "bfloat16"]),
        help="Precision of the operators that are not quantized. [default: the profile's]",
    ),
    click.option("--dynamic", is_flag=True, help="Measure activation ranges at run time (for transformers and RNNs)."),
    click.option(
        "--weight-only",
        type=click.Choice(["8", "4"]),
        metavar="BITS",
        help="Quantize only the weights of matrix products, block by block, to 8 or 4 bits.",
    ),
    click.option(
        "--eight-bit", multiple=True, metavar="NODE", help="Use 8 bits for this node with --weight-only 4. Repeatable."
    ),
    click.option(
        "--block-compute",
        type=click.Choice(["int8", "float32"]),
        help="Type in which --weight-only computes matrix products. [default: chosen by accuracy and timings]",
    ),
    click.option("--op-type", "op_types", multiple=True, help="Quantize only this operator type. Repeatable."),
    click.option("--exclude", multiple=True, metavar="NODE", help="Keep this node in float. Repeatable."),
    click.option(
        "--wide",
        multiple=True,
        metavar="NODE",
        help="Use 16-bit activations for this node (* means all nodes). Repeatable.",
    ),
)

_BARS = (
    click.option(
        "--max-drop",
        type=DROP,
        metavar="DROP",
        help="Largest loss of accuracy to accept: 0.01, 1% or 1pt. edgeq tries to repair a larger "
        "loss and fails if it cannot. Needs --task. [default: repair above 1pt, never fail]",
    ),
    click.option("--require-coverage", metavar="SHARE", help="Fail if less than this share of the MACs is in int8: "
    "0.95 or 95%."),
    click.option(
        "--effort",
        type=click.Choice(["quick", "default", "thorough"]),
        default="default",
        show_default=True,
        help="Effort for repairing a result that loses more than --max-drop or, without labels, has under 20 dB SQNR.",
    ),
    click.option("--as-is", is_flag=True, help="Do not repair the result, however far it is from float32."),
    click.option("--no-timing", is_flag=True, help="Do not time int8 against float32."),
    click.option("--no-emulate", is_flag=True, help="Forecast coverage instead of emulating other machines' kernels."),
    FORCE,
)  # fmt: skip


def data_options(function: F) -> F:
    """Add the options that select the data."""
    return _added(_with_classes(function), _DATA)


def task_options(*former: str) -> Callable[[F], F]:
    """Add the options for labels and for reading the outputs, such as --labels, --annotations and --decoder.

    Args:
        former: earlier names of --task-output.
    """

    def add(function: F) -> F:
        labels = click.option("--labels", help="Labels of the samples, if they are not stored with the samples.")
        return _added(_with_classes(function), (labels, *_DECODING, _task_output(*former)))

    return add


def comparison_options(function: F) -> F:
    """Add the options that set the data and the session for a comparison of two models."""
    options: tuple[Callable[[F], F], ...] = (
        click.option(
            "--data",
            type=SOURCE,
            help="Samples to run both models on: a folder, .npz, .npy, .pb or another source (docs/data.md).",
        ),
        click.option(
            "--task",
            type=TASK,
            shell_complete=COMPLETE_TASK,
            help=f"Task for measuring accuracy against labels: {TASK_NAMES}.",
        ),
        OWN_PREPROCESS,
        task_options(),
        click.option("--count", type=click.IntRange(min=1), help="Use at most this many samples."),
        THREADS,
        SESSION_OPTIONS,
    )
    return _added(function, options)


def comparison_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the values of `comparison_options` renamed to fields of
    `edgeq.reporting.compare.CompareRequest`.
    """
    from edgeq.measure.task import split_task_options
    from edgeq.run.session import parse_session_options

    task, arguments = split_task_options(options)
    return {**arguments, "options": task, "session_options": parse_session_options(arguments["session_options"])}


def build_options(function: F) -> F:
    """Add all the options for the data, the scheme and the limits."""
    return _added(_with_classes(function), (*_DATA, *_SCHEME, *_BARS))


def _with_classes(function: F) -> F:
    """Combine the values of --classes and --labels into an `edgeq.data.labels.Labels`, and pass it as `labels`."""

    @functools.wraps(function)
    def passing(*arguments: Any, classes: Path | None, **options: Any) -> None:
        """Call the command with the combined value."""
        if classes is not None:
            from edgeq.data.labels import Labels

            options["labels"] = Labels(options["labels"], classes)
        function(*arguments, **options)

    return passing  # type: ignore[return-value]


def _added(function: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        function = option(function)
    return function
