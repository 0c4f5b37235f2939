"""The file that ships, opened as devices open it: at their optimisation level, with the options that it comes with.

ONNX Runtime rewrites a graph when it opens it, most of that before it knows which provider runs what. So a file that is
proven in a simulation is opened here too, on CPU kernels, and so is the same file without optimisation. Where
the first answers worse than the second, or than the simulation, it is not the file that was proven.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgeq.backends import Artifact
from edgeq.data.samples import Samples
from edgeq.engines import DEFAULT
from edgeq.errors import CheckFailedError, DataError, RuntimeUnavailableError, one_line
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.inference import Outputs
from edgeq.session import SessionSettings, onnxruntime, open_session
from edgeq.workers.engine import Engines

_OPENED, _WRITTEN = "as opened", "as written"
# The graph as written runs on reference kernels, which are slow.
_SAMPLES = 8
# In dB: fusing changes roundings, which cost less; a simulation rounds in more places, which can change more.
_LOSS_DB, _UNLIKE_DB = 3.0, 10.0
# Nothing that int8 does is to be seen above this, in dB.
_EXACT_DB = 60.0
# Noise is half of the output's power, or a tenth. From there on, the figures of orders and indices differ by chance.
_GARBAGE_DB, _POOR_DB = 3.0, 10.0
# The optimizer that is known to change answers, and the session option that leaves it out.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
# Characters of another library's message.
_REASON = 120


@dataclass(frozen=True)
class Opening:
    """SQNR against float32 of one file, in dB, on the same few samples.

    Attributes:
        opened: with the level and the options with which devices open it.
        written: without graph optimisation.
        claimed: of the simulation that stands for the file in the proof; None where the file itself is proven.
        changer: the engine that opened it.
        cure: the session option that brings back what is lost, and the SQNR with it; None where none is known.
        notes: files that were not opened here, with the reason, one sentence each.
    """

    opened: float
    written: float
    claimed: float | None = None
    changer: str = DEFAULT
    cure: tuple[str, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> bool:
        """Return whether the session answers worse than the file as written, or far worse than its simulation."""
        claimed = self.opened if self.claimed is None else self.claimed
        due = max(min(self.written, _EXACT_DB) - _LOSS_DB, min(claimed, _EXACT_DB) - _UNLIKE_DB)
        return self.opened < due

    @property
    def sentence(self) -> str:
        """Say what opening the file changes, and what helps."""
        changer = "ONNX Runtime's optimiser" if self.changer == DEFAULT else self.changer
        claimed = "" if self.claimed is None else f", {self.claimed:.1f} dB in simulation"
        cure = "" if self.cure is None else f"; with the session option {self.cure[0]} it is {self.cure[1]:.1f} dB"
        return (
            f"{changer} changes the answer: {self.opened:.1f} dB SQNR against float32 on the optimised graph, "
            f"{self.written:.1f} dB on the graph as written{claimed}{cure}"
        )

    def check(self, model: Path) -> None:
        """Refuse a file of which opening makes garbage, or anything else than the simulation claims.

        Raises:
            CheckFailedError: names the file, the loss and what helps.
        """
        good = max(self.written, self.claimed or self.written) >= _POOR_DB
        if self.loss and good and (self.claimed is not None or self.opened < _GARBAGE_DB):
            raise CheckFailedError(
                f"{model.name}: {self.sentence}",
                "Keep other nodes in float with --exclude, and report the model",
            )


def open_as_device(
    artifact: Artifact,
    proven: Mapping[str, Any],
    samples: Samples,
    *,
    threads: int = 0,
    known: Mapping[str, Sequence[Outputs]] = MappingProxyType({}),
) -> Opening:
    """Open the file of `artifact` as devices do, and as it is written, on this machine's CPU kernels.

    Args:
        proven: the session of the float model, then that of what stands for the artifact in its proof.
        known: what the float model makes of each sample, if that is known.
    """
    reference, subject = proven
    shipped = SessionSettings(config=artifact.session_options, intra_op_threads=threads)
    settings = {_WRITTEN: dataclasses.replace(shipped, optimization="none")}
    if artifact.simulation is not None:
        settings[_OPENED] = shipped

    def compare(settings: Mapping[str, SessionSettings]) -> Mapping[str, Agreement]:
        sessions = {**proven, **{name: open_session(artifact.model, how) for name, how in settings.items()}}
        return evaluate_sessions(sessions, samples, reference=reference, count=_SAMPLES, known=known).agreement

    notes = tuple(_unopened_files(artifact, threads))
    runner = artifact.engine.name if artifact.engine is not None else artifact.provider
    try:
        found = compare(settings)
    except (RuntimeUnavailableError, DataError) as error:
        own = _level(compare({})[subject])
        return Opening(own, own, notes=(_unopened(f"the file for {runner}", artifact.model, error), *notes))
    changer = artifact.engine.name if artifact.engine is not None and artifact.simulation is None else DEFAULT
    opening = Opening(
        opened=_level(found[_OPENED if artifact.simulation is not None else subject]),
        written=_level(found[_WRITTEN]),
        claimed=_level(found[subject]) if artifact.simulation is not None else None,
        changer=changer,
        notes=notes,
    )
    disabled = artifact.session_options.get(_DISABLED, "")
    if not opening.loss or changer != DEFAULT or _REQUANTIZER in disabled:
        return opening
    option = ";".join(filter(None, [disabled, _REQUANTIZER]))
    without = dataclasses.replace(shipped, config={**artifact.session_options, _DISABLED: option})
    cured = _level(compare({_OPENED: without})[_OPENED])
    if cured < opening.opened + _LOSS_DB:
        return opening
    return dataclasses.replace(opening, cure=(f"{_DISABLED}={option}", cured))


def open_stand_in(artifact: Artifact, float_model: Path, samples: Samples) -> Opening:
    """`open_as_device` of an artifact that is not proven itself, because it stands in for one that is."""
    with Engines() as engines:
        subject = engines.open(artifact.proof_model, artifact.proof_settings())
        proven = {"float32": open_session(float_model), artifact.proof_model.name: subject}
        return open_as_device(artifact, proven, samples)


def _level(found: Agreement) -> float:
    """Return SQNR in dB, which leaves out what is not finite: minus infinity where anything is."""
    return float("-inf") if any(output.nonfinite for output in found.outputs) else found.sqnr_db


def _unopened_files(artifact: Artifact, threads: int) -> Iterator[str]:
    """Name the models that travel with the artifact's own and that no session of onnxruntime opens here."""
    for name, file in artifact.files.items():
        if file.suffix == ".onnx":
            try:
                open_session(file, SessionSettings(intra_op_threads=threads))
            except RuntimeUnavailableError as error:
                yield _unopened(name, file, error)


def _unopened(name: str, file: Path, error: Exception) -> str:
    text = one_line(error.__cause__ or error).replace(str(file), "it")
    reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)[:_REASON]
    return f"{name} was not run here: onnxruntime {onnxruntime().__version__} says {reason!r}"
