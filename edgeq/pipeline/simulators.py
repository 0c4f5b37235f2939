"""Simulators that stand for devices which nothing here can run, opened as sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.backends.systolic.save import load_program
from edgeq.backends.systolic.simulate import Simulator as ArraySimulator
from edgeq.bundle.plan import FILES
from edgeq.emulate.routes import Open, Simulator
from edgeq.engines import engine_for
from edgeq.errors import RuntimeUnavailableError
from edgeq.hardware.target import Target
from edgeq.measure.inference import Session
from edgeq.pipeline.emit_c import SUFFIX
from edgeq.session import SessionSettings
from edgeq.workers.engine import Engines


@dataclass(frozen=True)
class Output:
    """Name, type and shape of one output, as an onnxruntime session gives them."""

    name: str


class ProgramSession:
    """An integer program in the array's arithmetic, bit by bit."""

    def __init__(self, program: Path) -> None:
        self._simulator = ArraySimulator(load_program(program))

    def get_outputs(self) -> Sequence[Output]:
        """The outputs of the program, in order, as `InferenceSession.get_outputs` gives those of a model."""
        return [Output(name) for name in self._simulator.program.outputs]

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]) -> Sequence[Any]:
        """Simulate one sample; `output_names` as `InferenceSession.run` takes them, None for all outputs."""
        program, found = self._simulator.program, self._simulator.run(input_feed).tensors
        # An output without axes: the simulator gives one value for each sample.
        return [
            found[name] if program.tensors[name].shape else found[name].reshape(())
            for name in output_names or program.outputs
        ]


def open_program(model: Path, settings: SessionSettings) -> Session:
    """The program that travels with `model`: beside it, or among its variant's files in a bundle.

    Raises:
        RuntimeUnavailableError: there is none.
    """
    del settings
    packed = model.parents[3] / FILES / model.parent.name if len(model.parents) > 3 else model.parent
    found = [file for folder in (model.parent, packed) for file in sorted(folder.glob(f"*{SUFFIX}"))]
    if not found:
        raise RuntimeUnavailableError(f"{model} has no {SUFFIX} beside it", "Package the model again for this target")
    return ProgramSession(found[0])


@contextmanager
def _array(target: Target) -> Iterator[Open]:
    del target
    yield open_program


@contextmanager
def _engine(target: Target) -> Iterator[Open]:
    """The engine that the target's backend builds for, where it simulates the hardware."""
    engine = engine_for(target.backend, target.device.get("engine_options", {}))
    with Engines() as engines:
        yield lambda model, settings: engines.open(model, replace(settings, engine=engine))


SIMULATORS: Mapping[str, Simulator] = {"systolic": _array, "qnn": _engine}
"""By the name that a profile gives in [emulate] simulator."""
