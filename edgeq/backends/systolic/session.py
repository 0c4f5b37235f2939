"""Run programs for the array with the interface of onnxruntime sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.backends.systolic.save import SUFFIX, load_program
from edgeq.backends.systolic.simulate import Simulator
from edgeq.bundle.plan import FILES
from edgeq.errors import RuntimeUnavailableError
from edgeq.hardware.target import Target
from edgeq.measure.inference import Session
from edgeq.run.session import SessionSettings


@dataclass(frozen=True)
class SessionOutput:
    """Name one output, like an output of an onnxruntime session."""

    name: str


class ProgramSession:
    """Run an integer program in the array's arithmetic, bit by bit."""

    def __init__(self, program: Path) -> None:
        self._simulator = Simulator(load_program(program))

    def get_outputs(self) -> Sequence[SessionOutput]:
        """Return the outputs of the program in order, like `InferenceSession.get_outputs`."""
        return [SessionOutput(name) for name in self._simulator.program.outputs]

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Simulate one sample. The arguments are the same as in `InferenceSession.run`. Without output names, return
        all outputs.
        """
        program, tensors = self._simulator.program, self._simulator.run(input_feed).tensors
        # The output has no axes, but the simulator returns an array with one value for each sample.
        return [
            tensors[name] if program.tensors[name].shape else tensors[name].reshape(())
            for name in output_names or program.outputs
        ]


def open_program(model: Path, settings: SessionSettings) -> Session:
    """Open the program of `model`. The program is next to the model, or among the files of the model's variant in a
    bundle.

    Raises:
        RuntimeUnavailableError: the model has no program.
    """
    del settings
    # In a bundle, the model and the variant's other files are in different folders.
    packed = model.parents[3] / FILES / model.parent.name if len(model.parents) > 3 else model.parent
    programs = [file for folder in (model.parent, packed) for file in sorted(folder.glob(f"*{SUFFIX}"))]
    if not programs:
        raise RuntimeUnavailableError(f"{model} has no {SUFFIX} next to it", "Package the model again for this target")
    return ProgramSession(programs[0])


@contextmanager
def simulated_array(target: Target) -> Iterator[Callable[[Path, SessionSettings], Session]]:
    """Yield a function that opens a model's program as a session. See `Backend.simulator`."""
    del target
    yield open_program
