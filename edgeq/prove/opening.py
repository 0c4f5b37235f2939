"""Open the shipped file the way devices open it: at their optimisation level, with the options that ship with the file.

ONNX Runtime rewrites a graph when it opens the file, mostly before it assigns nodes to providers. So if a simulation
proves a file, edgeq also opens that file on CPU kernels, with and without optimisation. If the optimised graph is worse
than the unoptimised graph or worse than the simulation, the proof is not valid for the shipped file.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.backends.base import Artifact
from edgeq.data.array_store import ArrayStore
from edgeq.data.images import Array
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.errors import CheckFailedError, DataError, EdgeqError, RuntimeUnavailableError, one_line
from edgeq.measure.accuracy import compare_sessions, evaluate_sessions
from edgeq.measure.agreement import Agreement
from edgeq.measure.basis import sampled_basis
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs, Session, infer, run_samples
from edgeq.measure.paired import MOST_LOSS_DB, PairedEvaluation
from edgeq.model.graph import every_node
from edgeq.model.prepare import PreparedModel
from edgeq.run.draws import find_random_names
from edgeq.run.engines import DEFAULT
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_session
from edgeq.signature import Signature

_OPENED, _WRITTEN = "as opened", "as written"
# An unoptimised graph runs on reference kernels, which are slow.
_SAMPLES = 8
# A simulation rounds in more places than the kernels here, so its SQNR may differ by up to this many dB.
_UNLIKE_DB = 10.0
# Above this SQNR in dB, no effect of int8 is visible.
_EXACT_DB = 60.0
# SQNRs at which the power of the noise is half of the output's power (3 dB) or a tenth of it (10 dB). With so much
# noise, the SQNR of outputs that are orders or indices varies by chance.
_GARBAGE_DB, _POOR_DB = 3.0, 10.0
# An optimizer that is known to change outputs, and the session option that disables it.
_DISABLED = "optimization.disable_specified_optimizers"
_REQUANTIZER = "WeightBiasQuantization"
# The maximum number of characters to quote from another library's message.
_REASON = 120


@dataclass(frozen=True)
class Opening:
    """Hold one file's SQNRs against float32 in dB. All of them are measured on the same few samples.

    Attributes:
        opened: the SQNR with the optimisation level and the options that devices use.
        written: the SQNR without graph optimisation.
        claimed: the SQNR of the simulation that the proof uses instead of the file, or None if the proof uses the file
            itself.
        certain: whether the samples prove that the opened file is worse than the file as written.
        changer: the engine that opened the file.
        cure: the session option that avoids the loss, and the SQNR with this option; None if no such option is known.
        notes: one sentence for each file that was not opened here, with the reason.
    """

    opened: float
    written: float
    claimed: float | None = None
    certain: bool = True
    changer: str = DEFAULT
    cure: tuple[str, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> bool:
        """Return whether the opened file is worse than the file as written, or far worse than its simulation."""
        claimed = self.opened if self.claimed is None else self.claimed
        worse = self.certain and self.opened < min(self.written, _EXACT_DB) - MOST_LOSS_DB
        return worse or self.opened < min(claimed, _EXACT_DB) - _UNLIKE_DB

    @property
    def sentence(self) -> str:
        """Return one sentence that states how opening the file changes the result and which option helps."""
        changer = "ONNX Runtime's optimiser" if self.changer == DEFAULT else self.changer
        claimed = "" if self.claimed is None else f", {self.claimed:.1f} dB in simulation"
        cure = "" if self.cure is None else f"; with the session option {self.cure[0]} it is {self.cure[1]:.1f} dB"
        return (
            f"{changer} changes the outputs: {self.opened:.1f} dB SQNR against float32 on the optimised graph, "
            f"{self.written:.1f} dB on the graph as written{claimed}{cure}"
        )

    def check(self, model: Path) -> None:
        """Refuse a file if opening it makes its outputs useless, or makes them differ from those of its simulation.

        Raises:
            CheckFailedError: the file is refused. The message names the file, the loss and what helps.
        """
        good = max(self.written, self.claimed or self.written) >= _POOR_DB
        if self.loss and good and (self.claimed is not None or self.opened < _GARBAGE_DB):
            raise CheckFailedError(
                f"{model.name}: {self.sentence}",
                "Keep other nodes in float with ⟨exclude⟩, and report the model",
            )


def open_as_device(
    artifact: Artifact,
    proven: Mapping[str, Any],
    samples: Samples,
    *,
    threads: int = 0,
    known_outputs: Mapping[str, ArrayStore] = MappingProxyType({}),
    basis: Basis = EVERYTHING,
) -> Opening:
    """Open the file of `artifact` on this machine's CPU kernels, both with the optimisation that devices use and
    without optimisation.

    Args:
        proven: two sessions by name. The first runs the float model, the second runs the artifact as in its proof.
        known_outputs: the float model's outputs by the sample's place. What is missing is added.
        basis: what the figures are taken over.
    """
    reference, subject = proven
    arguments: dict[str, Any] = {
        "reference": reference,
        "count": _SAMPLES,
        "known_outputs": known_outputs,
        "basis": basis,
    }
    if artifact.plugin is not None and artifact.plugin.engine.suffix:  # the device does not open the ONNX file
        proven_db = _sqnr_db(evaluate_sessions(proven, samples, **arguments).agreement[subject])
        return Opening(proven_db, proven_db, notes=tuple(_unopened_files(artifact, threads)))
    shipped = SessionSettings(config=artifact.session_options, intra_op_threads=threads)
    settings = {_WRITTEN: dataclasses.replace(shipped, optimization="none")}
    if artifact.simulation is not None:
        settings[_OPENED] = shipped

    def compare(settings: Mapping[str, SessionSettings]) -> tuple[Mapping[str, Agreement], bool]:
        """Return the agreement of all sessions, and whether the samples prove a loss against the graph as written."""
        sessions = {
            **proven,
            **{name: open_session(artifact.model, session_settings) for name, session_settings in settings.items()},
        }
        written_name, opened_name = (name if name in sessions else subject for name in (_WRITTEN, _OPENED))
        paired = PairedEvaluation(tuple(sessions), None, reference, written_name, opened_name, basis)
        for sample, outputs in run_samples(sessions, samples, count=_SAMPLES, known_outputs=known_outputs):
            paired.update(sample, outputs)
        return paired.evaluation.result({}).agreement, any(loss.proven for loss in paired.errors.result())

    notes = tuple(_unopened_files(artifact, threads))
    runner = artifact.engine.name if artifact.engine is not None else artifact.provider
    try:
        agreements, certain = compare(settings)
    except (RuntimeUnavailableError, DataError) as error:
        proven_db = _sqnr_db(compare({})[0][subject])
        return Opening(
            proven_db, proven_db, notes=(_describe_failure(f"the file for {runner}", artifact.model, error), *notes)
        )
    changer = artifact.engine.name if artifact.engine is not None and artifact.simulation is None else DEFAULT
    opened_db = _sqnr_db(agreements[_OPENED if artifact.simulation is not None else subject])
    opening = Opening(
        opened=opened_db,
        written=_sqnr_db(agreements[_WRITTEN]),
        claimed=_sqnr_db(agreements[subject]) if artifact.simulation not in (None, artifact.model) else None,
        certain=certain or opened_db == -math.inf,
        changer=changer,
        notes=notes,
    )
    disabled = artifact.session_options.get(_DISABLED, "")
    if not opening.loss or changer != DEFAULT or _REQUANTIZER in disabled:
        return opening
    option = ";".join(filter(None, [disabled, _REQUANTIZER]))
    without = dataclasses.replace(shipped, config={**artifact.session_options, _DISABLED: option})
    cured = _sqnr_db(compare({_OPENED: without})[0][_OPENED])
    if cured < opening.opened + MOST_LOSS_DB:
        return opening
    return dataclasses.replace(opening, cure=(f"{_DISABLED}={option}", cured))


def open_stand_in(artifact: Artifact, float_model: Path, samples: Samples, basis: Basis = EVERYTHING) -> Opening:
    """Run `open_as_device` on an artifact that replaces a proven artifact and has no proof of its own."""
    with Engines() as engines:
        subject = engines.open(artifact.proof_model, artifact.proof_settings())
        proven = {"float32": open_session(float_model), artifact.proof_model.name: subject}
        return open_as_device(artifact, proven, samples, basis=basis)


def _sqnr_db(agreement: Agreement) -> float:
    """Return the SQNR in dB, or minus infinity if any output is not finite. The SQNR itself ignores values that are not
    finite.
    """
    return -math.inf if any(output.nonfinite for output in agreement.outputs) else agreement.sqnr_db


def _unopened_files(artifact: Artifact, threads: int) -> Iterator[str]:
    """Yield a note on each additional model of the artifact that no session of onnxruntime opens here."""
    for name, file in artifact.files.items():
        if file.suffix == ".onnx":
            try:
                open_session(file, SessionSettings(intra_op_threads=threads))
            except RuntimeUnavailableError as error:
                # The name of the model, with which this file's name begins, depends on where the model is written.
                stem = f"{artifact.model.stem}."
                yield _describe_failure(f"*.{name.removeprefix(stem)}" if name.startswith(stem) else name, file, error)


def _describe_failure(name: str, file: Path, error: Exception) -> str:
    text = one_line(error.__cause__ or error).replace(str(file), "it")
    reason = one_line(re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text), most=_REASON)
    return f"{name} was not run here: onnxruntime {onnxruntime().__version__} reports {reason!r}"


# The larger and smaller sizes are divisible by the largest power of two, up to this value, that divides the sample's
# size. Models with strides need this.
_STEP = 32
_LOST_DB = 20.0
"""A loss in dB that is larger than different input values alone can cause. A wrong shape or a hard-coded size causes a
larger loss.
"""
_SIZED_BY_DATA = frozenset({"Compress", "Loop", "NonMaxSuppression", "NonZero", "Unique"})

Shapes = Mapping[str, tuple[int, ...]]
"""Input → shape."""


def check_other_sizes(
    prepared: PreparedModel,
    sessions: tuple[Session, Session],
    samples: Samples,
    *,
    takes: Signature,
    form: str,
    sqnr_db: float,
    least_db: float,
    basis: Basis = EVERYTHING,
) -> None:
    """If the source model has inputs with free sizes, run the first sample at other sizes. The sample is repeated or
    cut to give it these sizes.

    Sizes that the source does not accept are skipped.

    Args:
        sessions: the session of the source (or its prepared form) and the session of the candidate, which is a model
            made from the source.
        takes: the inputs of the candidate. Sizes that these inputs do not allow are also skipped.
        form: the name of the candidate in the message, such as "its quantized form".
        sqnr_db: the SQNR of the candidate against the reference at the samples' own sizes, in dB.
        least_db: the SQNR in dB that is enough at other sizes, however good the candidate is at the samples' own sizes.
        basis: what the figures are taken over.

    Raises:
        CheckFailedError: at a size that the source accepts, the candidate fails or gives different outputs.
    """
    reference, candidate = sessions
    operators = {node.op_type for node in every_node(prepared.model)}
    sizes_follow = operators.isdisjoint(_SIZED_BY_DATA)
    sample = next(iter(samples))
    original = {name: array.shape for name, array in sample.inputs.items()}
    for group in _groups(prepared.signature, original):
        for shapes in (shapes for shapes in group if _takes(takes, shapes)):
            inputs = {name: _resize(array, shapes[name]) for name, array in sample.inputs.items()}
            resized = replace(sample, name=f"{sample.name}, resized", inputs=inputs)
            expected = _outputs(reference, resized)
            if expected is None:
                continue
            problem = _problem(expected, candidate, resized, min(least_db, sqnr_db - _LOST_DB), sizes_follow, basis)
            if not problem:
                break
            if _outputs(open_session(prepared.source), resized) is not None:
                listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
                raise CheckFailedError(
                    f"{prepared.source}: {form} is wrong at a size that the model takes, {listed}: {problem}",
                    f"Fix the sizes that you need: {_fixes(prepared.signature, original, shapes)}",
                )


def _groups(signature: Signature, original: Shapes) -> Iterator[list[Shapes]]:
    """Yield groups of shapes to try. The groups are: a different batch size, larger sizes, smaller sizes, and sizes
    without a common divisor.

    In each group, only the first shapes that the source accepts need to be tried. Free sizes with different names get
    different values if the source accepts that.
    """

    def shapes(axes: Callable[[int], bool], change: Callable[[int, int], int], *, distinct: bool) -> Shapes:
        places: dict[object, int] = {}
        changed = {}
        for spec in signature.inputs:
            sizes = list(original[spec.name])
            for axis, named in enumerate(spec.shape or ()):
                if not isinstance(named, int) and axes(axis):
                    place = places.setdefault(named or (axis, sizes[axis]), len(places)) if distinct else 0
                    sizes[axis] = change(sizes[axis], place + 1)
            changed[spec.name] = tuple(sizes)
        return changed

    def larger(size: int, place: int) -> int:
        return size + place * _step(size)

    def smaller(size: int, place: int) -> int:
        return size - place * _step(size)

    def odd(size: int, place: int) -> int:
        return size - size // 4 - place

    batch = [shapes(lambda axis: axis == 0, lambda size, place: size + 1, distinct=False)]
    even = [shapes(bool, change, distinct=distinct) for change in (larger, smaller) for distinct in (True, False)]
    uneven = [shapes(bool, odd, distinct=distinct) for distinct in (True, False)]
    for group in (batch, even, uneven):
        candidates = [s for s in group if s != original and all(size > 0 for sizes in s.values() for size in sizes)]
        if candidates:
            yield candidates


def _step(size: int) -> int:
    return min(_STEP, size & -size) if size else 1


def _resize(array: Array, shape: tuple[int, ...]) -> Array:
    """Repeat or cut an array along each axis to give it `shape`. All values are then still values of a sample."""
    if not array.size:
        return np.zeros(shape, array.dtype)
    for axis, size in enumerate(shape):
        array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return array


def _takes(signature: Signature, shapes: Shapes) -> bool:
    """Return whether `shapes` agree with all the fixed sizes of the inputs."""
    pairs = (pair for spec in signature.inputs for pair in zip(spec.shape or (), shapes[spec.name], strict=False))
    return all(not isinstance(declared, int) or declared == size for declared, size in pairs)


def _outputs(session: Session, sample: Sample) -> Outputs | None:
    try:
        return infer(session, sample)
    except EdgeqError:
        return None


def _problem(
    expected: Outputs, candidate: Session, sample: Sample, least_db: float, sizes_follow: bool, basis: Basis
) -> str:
    """Return what is wrong with the candidate's outputs for a sample, or "" if they are correct.

    Args:
        least_db: the minimum SQNR in dB against `expected`.
        sizes_follow: True if the shapes of the inputs determine the shapes of the outputs.
    """
    comparison = OutputSums(basis=basis)
    try:
        comparison.update(expected, infer(candidate, sample), sample.inputs)
    except EdgeqError as error:
        return error.problem
    agreement = comparison.result()
    for output in agreement.outputs:
        if output.mismatched and sizes_follow:
            return f"output {output.name!r} has another shape"
        if output.nonfinite:
            return f"output {output.name!r} is not finite"
    # Compare whole outputs, not their parts. A single sample with small values next to large values does not show that
    # the parts have different units.
    sqnr_db = min((output.sqnr_db for output in agreement.outputs if output.same is None), default=math.inf)
    return f"{sqnr_db:.1f} dB SQNR" if sqnr_db < least_db else ""


def _fixes(signature: Signature, original: Shapes, attempted: Shapes) -> str:
    sizes: dict[str, int] = {}
    for spec in signature.inputs:
        for axis, named in enumerate(spec.shape or ()):
            if attempted[spec.name][axis] != original[spec.name][axis]:
                sizes.setdefault(str(named or f"{spec.name}:{axis}"), original[spec.name][axis])
    return " ".join(f"⟨fix⟩ {name}={size}" for name, size in sizes.items())


LEAST_DB = 30.0
"""The minimum SQNR in dB of a prepared model. 16-bit floats round differently, which mostly gives 40 to 60 dB."""
_FAR_DB = 10.0
"""The SQNR of a prepared model may be this many dB lower than the SQNR between two optimisation levels of its
source.
"""


def check_preparation(prepared: PreparedModel, samples: Samples) -> PreparedModel:
    """Return `prepared`. If its outputs for the first samples differ from those of its source, add a note.

    There is no note if the two cannot be compared. This is the case if the preparation removed a random operator, if
    onnxruntime can run only its prepared form, or if its outputs consist of rounding errors. For example, the outputs
    of a detector are values like 1e-9 if it finds nothing.

    Raises:
        CheckFailedError: the outputs differ at another size that the source accepts. See `check_other_sizes`.
    """
    if find_random_names(prepared.source) != find_random_names(prepared.path):
        return prepared
    try:
        source, prepared_session = open_session(prepared.source), open_session(prepared.path)
        basis = sampled_basis(prepared.graph, prepared_session, samples)
        agreement = compare_sessions(source, prepared_session, samples, count=1, basis=basis)
        if not agreement.compared or agreement.same is not None or agreement.sqnr_db >= LEAST_DB:
            check_other_sizes(
                prepared,
                (source, prepared_session),
                samples,
                takes=prepared.signature,
                form="its prepared form",
                sqnr_db=agreement.sqnr_db,
                least_db=LEAST_DB,
                basis=basis,
            )
            return prepared
        agreement = compare_sessions(source, prepared_session, samples, count=_SAMPLES, basis=basis)
        unoptimised = open_session(prepared.source, SessionSettings(optimization="none"))
        rounded = compare_sessions(source, unoptimised, samples, count=_SAMPLES, basis=basis)
    except (RuntimeUnavailableError, DataError):
        return prepared
    if agreement.sqnr_db >= min(LEAST_DB, rounded.sqnr_db - _FAR_DB):
        return prepared
    note = (
        f"the preparation changed the model's outputs: {agreement.sqnr_db:.1f} dB SQNR against {prepared.source} on "
        "the first samples; all figures are against the prepared model; please report this model"
    )
    return replace(prepared, notes=(*prepared.notes, note))
