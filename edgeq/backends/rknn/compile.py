"""Compile a Q/DQ file with Rockchip's toolkit, read where each layer runs, and compare the toolkit's simulator with
ONNX Runtime.

The simulator computes the compiler's graph in float and rounds at the places that the file defines. It does not model a
chip. So it proves that the compiler imported the file without a change, but not what a chip computes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.prepare.npz import write_npz
from edgeq_device.system.files import open_file
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.backends.rknn.data import chip_named, dialect, toolkit
from edgeq.backends.rknn.worker import REASON
from edgeq.data.samples import Sample
from edgeq.errors import CheckFailedError, EngineError, HardwareError, ModelError, one_line
from edgeq.hardware.target import Target
from edgeq.measure.inference import Session, infer
from edgeq.measure.paired import measure_paired_losses
from edgeq.model.load import unchecked_signature
from edgeq.run.session import SessionSettings, open_session
from edgeq.run.toolkit import Ran, ToolkitJob, find_python
from edgeq.signature import Signature, TensorSpec

UNFUSED = SessionSettings(optimization="none")
"""Settings that run the file's operators in ONNX Runtime's kernels without fusing them. The simulator gives the same
outputs as these kernels, bit for bit.
"""
PLATFORM = "target_platform"
_JOB, _SAMPLES, _ANSWERS = "job.json", "samples", "answers"
# The compiler colours its log even when it writes to a file.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A row of the table of layers that the compiler prints in its verbose log.
_ROW = re.compile(
    r"D RKNN: \[[^\]]*\] \d+\s+(?P<op>\S+)\s+(?P<dtype>\S+)\s+(?P<place>\S+)\s+\S+\s+\S+\s+"
    r"\d+/\d+/(?P<cycles>\d+)\s+(?P<rest>.*\S)"
)
_UNKNOWN = re.compile(r"No lowering found for:?\s*(?P<node>[^,]+)(?:,\s*node type\s*=\s*(?P<op>\w+))?")
_PROBLEM = re.compile(r"^E (?:RKNN: )?(?:\[[^\]]*\] )?(?P<text>.*\S)")
# Lines that the toolkit also prints as errors, but that give no reason.
_NOTHING = re.compile(r"toolkit2 version:|Traceback|Catch exception|=====|File \"")
# The last line of a Python traceback.
_RAISED = re.compile(r"\w*(Error|Exception)\b")
# A longer text would hide the rest of the message.
_LONGEST = 300


@dataclass(frozen=True)
class CompiledLayer:
    """Describe a row of the compiler's table of layers.

    Attributes:
        name: name of the node from which the layer was made, followed by text that the compiler appends.
        place: "NPU" or "CPU".
        dtype: data type, such as "INT8" or "FLOAT16".
        cycles: the compiler's estimate of the cycles; 0 on the CPU.
    """

    name: str
    op_type: str
    dtype: str
    place: str
    cycles: int


@dataclass(frozen=True)
class Compiled:
    """Hold a compiled file, its layers, and the simulator's answers for each sample."""

    file: Path
    layers: tuple[CompiledLayer, ...]
    answers: tuple[tuple[NDArray[Any], ...], ...]

    @property
    def cycles(self) -> int:
        """Return the sum of the cycles that the compiler estimates for the layers."""
        return sum(layer.cycles for layer in self.layers)


class Compilation:
    """Run the compiler on one ONNX file. Its simulator is available until the `with` block ends.

    Args:
        folder: an empty folder for the compiled file and the output of the process.
        inputs: names of the model's inputs, in their order.
        quantize: the list of calibration samples for the toolkit's own quantizer; None uses the file's scales.

    Raises:
        RuntimeUnavailableError: the toolkit is not installed.
    """

    def __init__(
        self, model: Path, platform: str, folder: Path, inputs: Sequence[str], *, quantize: Path | None = None
    ) -> None:
        self._model, self._folder, self._inputs, self._asked = model, folder, tuple(inputs), 0
        self._output, self._float16 = folder / "model.rknn", chip_named(platform).float16
        for name in (_SAMPLES, _ANSWERS):
            (folder / name).mkdir()
        job = {
            "config": config_for(platform),
            "model": str(model.resolve()),
            "output": str(self._output),
            "quantize": str(quantize) if quantize is not None else None,
            "inputs": list(inputs),
            "answers": str(folder / _ANSWERS),
        }
        # A file, because lists of inputs can be longer than a command line may be.
        (folder / _JOB).write_text(json.dumps(job), encoding="utf-8")
        self._job = ToolkitJob(toolkit(), Path(__file__).with_name("worker.py"), [_JOB], folder)

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *failure: object) -> None:
        self._job.__exit__()

    def answer(self, inputs: Mapping[str, Any]) -> tuple[NDArray[Any], ...]:
        """Run one sample in the simulator and return its outputs.

        Raises:
            ModelError, EngineError, OutputError: see `finish`.
        """
        name = f"{self._asked}.npz"
        self._asked += 1
        question, answer = self._folder / _SAMPLES / name, self._folder / _ANSWERS / name
        # The worker reads arrays from files: its pipe carries only lines of text.
        with question.open("wb") as file:
            write_npz(file, {name: np.asarray(inputs[name]) for name in self._inputs})
        if not self._job.ask(str(question), answer):
            # The process has ended by itself, so this call raises the error with the reason.
            self.finish()
            raise EngineError(f"{toolkit().needs} ended before its simulator answered", "Try again")
        arrays = _arrays(answer)
        # The samples of a large model would fill the disk.
        question.unlink()
        answer.unlink()
        return arrays

    def finish(self) -> tuple[Path, tuple[CompiledLayer, ...]]:
        """Wait until the compiler ends, and return the compiled file and its layers.

        Raises:
            ModelError: the compiler does not support an operator.
            EngineError: the compiler refuses the model, crashes or hangs.
            OutputError: the disk is full.
        """
        ran = self._job.finish()
        layers = layers_of(ran.out)
        check_ran(ran, self._output, layers, self._model, float16=self._float16)
        return self._output, layers


def compile_model(
    model: Path, platform: str, folder: Path, inputs: Sequence[str], samples: Sequence[Sample]
) -> Compiled:
    """Compile an ONNX file for a chip, and run it in the simulator. See `Compilation`.

    Raises:
        RuntimeUnavailableError, ModelError, EngineError, OutputError: see `Compilation`.
    """
    with Compilation(model, platform, folder, inputs) as compilation:
        answers = tuple(compilation.answer(sample.inputs) for sample in samples)
        file, layers = compilation.finish()
    return Compiled(file, layers, answers)


class ToolkitSession:
    """Run a Q/DQ file in the compiler's simulator, with the interface of an onnxruntime session."""

    def __init__(self, compilation: Compilation, signature: Signature) -> None:
        self._compilation, self._outputs = compilation, signature.outputs

    def get_outputs(self) -> Sequence[TensorSpec]:
        """Return the outputs of the model, in order."""
        return self._outputs

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Simulate one sample and return the named outputs. None means all outputs."""
        arrays = {}
        for spec, array in zip(self._outputs, self._compilation.answer(input_feed), strict=True):
            shape = [size for size in spec.shape or () if isinstance(size, int)]
            # The simulator's arrays may have other axes than the outputs. An array of another size stays as it came.
            fits = len(shape) == len(spec.shape or ()) and math.prod(shape) == array.size
            arrays[spec.name] = array.reshape(shape) if fits else array
        return [arrays[name] for name in output_names or arrays]


@contextmanager
def simulated_chip(target: Target) -> Iterator[Callable[[Path, SessionSettings], Session]]:
    """Yield a function that compiles a model for the target's chip and opens it in the simulator. See
    `Backend.simulator`.

    Raises:
        RuntimeUnavailableError: the toolkit is not installed.
    """
    find_python(toolkit())
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("edgeq-rknn-"))
        places = itertools.count()

        def open_session_of(model: Path, settings: SessionSettings) -> Session:
            """Start the compiler on a model. The session settings are not used."""
            del settings
            work, signature = folder / str(next(places)), unchecked_signature(model, model)
            work.mkdir()
            names = [spec.name for spec in signature.inputs]
            return ToolkitSession(stack.enter_context(Compilation(model, platform_of(target), work, names)), signature)

        yield open_session_of


def platform_of(target: Target) -> str:
    """Return the compiler's name for the target's chip.

    Raises:
        HardwareError: the target's file names no chip, or sets other options of the compiler.
    """
    options = target.device.get("engine_options", {})
    if set(options) != {PLATFORM}:
        problem = f"{target.name}: engine_options does not name a chip"
        raise HardwareError(problem, f'Write only {{ {PLATFORM} = "rk3588" }}')
    return chip_named(options[PLATFORM]).name


def config_for(platform: str) -> dict[str, Any]:
    """Return the compiler options for a chip."""
    rules = [rule.name for rule in dialect().disable_rule]
    return {
        "target_platform": chip_named(platform).name,
        "optimization_level": dialect().level.optimization_level,
        "disable_rules": rules,
    }


def layers_of(log: str) -> tuple[CompiledLayer, ...]:
    """Return the rows of the compiler's table, which is mixed with the other lines of its log."""
    layers = []
    for row in map(_ROW.match, _lines(log)):
        if row is not None and row["op"] not in dialect().table.ends:
            name = row["rest"].partition(f"{row['op']}:")[2]
            layers.append(CompiledLayer(name.strip(), row["op"], row["dtype"], row["place"], int(row["cycles"])))
    return tuple(layers)


def check_ran(ran: Ran, output: Path, layers: Sequence[CompiledLayer], model: Path, *, float16: bool = True) -> None:
    """Raise an error if a job failed, whatever its exit status is.

    Args:
        float16: whether the chip can run layers in float. If not, no advice is to keep layers in float.

    Raises:
        ModelError: the compiler does not support an operator.
        EngineError: the job failed for another reason; the message states the reason that the toolkit reports.
    """
    lines = [*_lines(ran.errors), *_lines(ran.out)]
    # The toolkit reports an unknown operator only in its log, whatever its exit status is.
    unknown = next((match for line in lines if (match := _UNKNOWN.search(line))), None)
    if unknown is not None:
        lack = (
            unknown["node"][:_LONGEST] if unknown["op"] is None else f"{unknown['op']} ({unknown['node'][:_LONGEST]})"
        )
        problem = f"{model.name}: {toolkit().needs} does not support {lack}"
        raise ModelError(problem, "Export the model without that operator")
    fix = "Keep nodes in float with ⟨exclude⟩, or export" if float16 else "Export"
    fix += " the model without the operator that it names"
    if ran.code != 0:
        raise EngineError(f"{toolkit().needs} {ran.ending}{_reason(lines)}", fix)
    # An exit status of 0 proves nothing here.
    if not output.is_file() or not layers:
        lack = "wrote no file" if not output.is_file() else "printed no table of layers"
        raise EngineError(f"{toolkit().needs} {lack}{_reason(lines)}", fix)


def _reason(lines: Sequence[str]) -> str:
    """Return a colon and the toolkit's reason for a failure, or "" if the toolkit reports no reason."""
    raised = [line for line in lines if _RAISED.match(line) and not line.endswith("(most recent call last):")]
    errors = [match["text"] for line in lines if (match := _PROBLEM.match(line)) and not _NOTHING.search(line)]
    refusals = [line.partition(REASON)[2].strip() for line in lines if line.startswith(REASON)]
    # The exception says more than the lines of the log, which say more than the name of the step that failed.
    text = next((texts[-1] for texts in (raised, errors, refusals) if texts), "")
    return f": {one_line(text, most=_LONGEST)}" if text else ""


def _lines(text: str) -> list[str]:
    return [_COLOUR.sub("", line).strip() for line in re.split(r"[\r\n]+", text)]


def _arrays(file: Path) -> tuple[NDArray[Any], ...]:
    try:
        with open_file(file) as stream, np.load(stream, allow_pickle=False) as archive:
            return tuple(archive[name] for name in archive.files)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise EngineError(f"{toolkit().needs} left an answer that cannot be read: {error}", "Try again") from error


def unfused(model: Path, samples: Sequence[Sample]) -> list[Mapping[str, NDArray[Any]]]:
    """Run the samples with ONNX Runtime's unfused kernels and return the answers."""
    session = open_session(model, UNFUSED)
    return [infer(session, sample) for sample in samples]


def compare_answers(
    compiled: Compiled,
    expected: Sequence[Mapping[str, NDArray[Any]]],
    exact: Sequence[Mapping[str, NDArray[Any]]],
    model: Path,
    coarse: str = "",
) -> str:
    """Compare the simulator's answers with ONNX Runtime's, and return a sentence with the result.

    How many values differ does not matter, because a step of the scale is below the quantization noise. A file is
    refused if both is true of an output: the difference is larger than roundings explain, and the simulator's answers
    are certainly further from the float model's.

    Args:
        expected: answers of the unfused kernels.
        exact: answers of the float model, which show how much quantization changed the answers. Layers in float16 may
            change the answers by as much. If their small errors make a later layer round a value to another integer,
            the difference spreads like any other rounding error.
        coarse: a sentence that names a tensor for which float16 may be too coarse; "" if there is none.

    Raises:
        CheckFailedError: the file is refused.
    """
    fix = "Report this model, and package it for a CPU target, such as generic-arm64"
    simulated = []
    for arrays, right in zip(compiled.answers, expected, strict=True):
        # Sizes are compared instead of shapes, because the simulator's arrays may have other axes.
        if [array.size for array in arrays] != [array.size for array in right.values()]:
            raise CheckFailedError(f"{model.name}: the simulator's answers have another shape", fix)
        pairs = zip(arrays, right.items(), strict=True)
        simulated.append({name: array.reshape(values.shape) for array, (name, values) in pairs})
    flat = [
        np.concatenate([_flat(a) for arrays in answers for a in arrays.values()]) for answers in (simulated, expected)
    ]
    count, share = f"{len(expected)} sample{'s' * (len(expected) != 1)}", float(np.mean(flat[0] == flat[1]))
    if share == 1:
        return f"its simulator equals ONNX Runtime's unfused kernels bit for bit on {count}"
    half = any(layer.dtype != "INT8" for layer in compiled.layers)
    # Float16 layers round much more coarsely than a sum in another order does; both limits were measured.
    limit_db = dialect().float16.least_db if half else dialect().rounding.least_db
    # Each output is judged by itself: a large output would hide the error of a small one.
    losses = measure_paired_losses(exact, expected, simulated)
    wrong = [loss for loss in losses if loss.level_db < limit_db and loss.proven]
    if wrong:
        raise CheckFailedError(
            f"{model.name}: the simulator's answers differ from those of ONNX Runtime's unfused kernels "
            f"({wrong[0].level_db:.1f} dB SQNR): {wrong[0].sentence}",
            f"{coarse}, or deploy the variant for the CPU" if half and coarse else fix,
        )
    why = "float16 layers round" if half else "sums of floats round in another order"
    level = min((loss.level_db for loss in losses), default=math.inf)
    return (
        f"its simulator agrees with ONNX Runtime's unfused kernels to {level:.1f} dB on {count}, "
        f"{share:.2%} of values equal: {why}"
    )


def _flat(array: NDArray[Any]) -> NDArray[np.float64]:
    return array.reshape(-1).astype(np.float64)
