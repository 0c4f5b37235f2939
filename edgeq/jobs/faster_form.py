"""Find out whether another form of the model is faster on this machine than the one that `quantize` made, and about as
accurate.

Other forms are float32 itself, the plain build that a repair replaced, and the float model in another engine that is
installed. Only one engine is tried, on a few samples and in one session, because `edgeq tune` compares engines
thoroughly.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from edgeq_device.engines.catalog import FLOAT as FLOAT_PRECISION
from edgeq_device.measure.claim import FASTER, SLOWER, UNKNOWN, Claim, make_claim
from edgeq_device.measure.latency import Distribution
from edgeq_device.measure.load import CompetingLoad

from edgeq.data.samples import spread_over
from edgeq.errors import EdgeqError
from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import detect_engines
from edgeq.hardware.target import Target
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.measure.agreement import worst_db
from edgeq.measure.race import RacedFile, race_files
from edgeq.measure.timed_model import count_sessions
from edgeq.model.files import model_files
from edgeq.prove.builds import Builds
from edgeq.prove.engine_choices import exists_for
from edgeq.prove.job import Built, Job
from edgeq.prove.proof import FLOAT, INT8, FasterForm, NotFiniteError, Proof, SpeedComparison
from edgeq.prove.request import Request
from edgeq.run.engines import EngineChoice, find_only_engine, load_engines
from edgeq.run.session import Engines, SessionSettings, build_float_settings
from edgeq.scheme import Scheme
from edgeq.tuning.goal import allowed_drop

_PLAIN = "plain"
_SAMPLES = 16
"""Number of samples that show the loss of the float model in another engine. Its errors are far smaller than int8's."""


@dataclass(frozen=True)
class ProvenForm:
    """Hold a build and its proof."""

    built: Built
    proof: Proof


@dataclass(frozen=True)
class _Rival:
    """Hold the float model in another engine, and its loss of accuracy as a fraction. Without labels, the loss is the
    noise power divided by the signal power.
    """

    choice: EngineChoice
    file: RacedFile
    loss: float


def keep_plain(builds: Builds, built: Built, scheme: Scheme, limit: float) -> ProvenForm | None:
    """Return a copy of a plain build that falls short, with its proof, because a repair may replace its file. Return
    None if the build does not fall short, or if an output is not finite.

    Args:
        limit: the loss above which a build falls short, as a fraction.
    """
    try:
        proof = builds.prove(built, scheme, native=True)
    except NotFiniteError:
        return None  # such a build is never handed over; the repair reports the error if nothing helps
    if not proof.falls_short(limit):
        return None
    folder = builds.job.folder / "plain"
    folder.mkdir()
    for file in model_files(built.artifact.model):
        shutil.copyfile(file, folder / file.name)
    return ProvenForm(_moved(built, folder / built.artifact.model.name), proof)


def compare_forms(job: Job, request: Request, chosen: ProvenForm, plain: ProvenForm | None) -> ProvenForm:
    """Time the chosen build against other forms of the model. Return the build to hand over, with what is known about
    its speed in its proof.

    The plain build is handed over if it is certainly faster than the repaired one, and labels allow its loss.

    Args:
        chosen: the build to hand over otherwise. If its proof has timed it already, nothing more is timed unless it is
            slower than float32.
        plain: the plain build that `chosen` repairs; None if there is none that could be handed over instead.

    Raises:
        EdgeqError: a session cannot be opened. An engine that fails is only left out.
    """
    speed, target = chosen.proof.speed, chosen.built.target
    if speed is not None and not _is_slow(speed.ratio):
        return chosen
    limit, choice = allowed_drop(request.max_drop, job.task), find_unquantized(target, job.machine)
    with Engines(keep=True) as engines:
        load = CompetingLoad()
        # If the build has been timed against float32, the race is only about the engine, and one session is enough.
        count = count_sessions(job.prepared.path) if speed is None else 1
        plugin = chosen.built.artifact.plugin
        float_settings = build_float_settings(plugin.engine.int8.backend if plugin is not None else "")
        files = {FLOAT: _raced(engines, job.prepared.path, float_settings, count)}
        for name, form in ((INT8, chosen), (_PLAIN, plain)):
            if form is not None:
                artifact = form.built.artifact
                files[name] = _raced(engines, artifact.proof_model, artifact.proof_settings(), count)
        rival = _open_rival(engines, job, files[FLOAT].session, choice) if choice is not None else None
        if rival is not None and rival.loss <= limit:
            files[rival.choice.name] = rival.file
        latency: Mapping[str, Distribution] = {}
        if speed is None or len(files) > 2:
            with job.progress.stage("Timing other forms") as advance:
                latency = race_files(engines, files, next(iter(job.validation)).inputs, load, lambda: advance(0))
    best, name = chosen, INT8
    if plain is not None and _is_allowed_by_labels(plain.proof, limit):
        is_faster = make_claim(latency[INT8], latency[_PLAIN]).verdict == FASTER
        best, name = (plain, _PLAIN) if is_faster else (best, name)
    if speed is None:
        timed = {FLOAT: latency[FLOAT].drop_disturbed(), INT8: latency[name].drop_disturbed()}
        speed = SpeedComparison(timed, make_claim(latency[FLOAT], latency[name]))
    advice = "" if choice is not None or speed.ratio.verdict == FASTER else advise_engine(target, job.machine)
    alternative = _find_faster(latency, name, rival, request, job) or _describe_float(speed.ratio, request)
    return replace(best, proof=replace(best.proof, speed=replace(speed, alternative=alternative, advice=advice)))


def hand_over(form: ProvenForm, destination: Path) -> ProvenForm:
    """Copy the files of a kept build next to `destination`, under the same names, and return the build there."""
    for file in model_files(form.built.artifact.model):
        shutil.copyfile(file, destination.with_name(file.name))
    return replace(form, built=_moved(form.built, destination))


def _moved(built: Built, model: Path) -> Built:
    return replace(built, artifact=replace(built.artifact, model=model))


def find_unquantized(target: Target, machine: Machine) -> EngineChoice | None:
    """Return an installed engine that can run the float model of `target` on this machine's CPU, in its fastest
    precision. An engine that computes in less than 32 bits here comes first. Return None if there is none.
    """
    choices = []
    for state in detect_engines(machine, load_engines()):
        if state.usable and _can_run(state.name, target):
            low = [precision for precision in state.precisions if precision != FLOAT_PRECISION]
            choices.append((not low, state.name, (low or [FLOAT_PRECISION])[0]))
    return EngineChoice(load_engines()[min(choices)[1]], min(choices)[2]) if choices else None


def advise_engine(target: Target, machine: Machine) -> str:
    """Return a sentence on an engine that is not installed, but would compute in less than 32 bits on this machine;
    "" if there is none.
    """
    for state in detect_engines(machine, load_engines()):
        low = [precision for precision in state.precisions if precision != FLOAT_PRECISION]
        if low and state.install and _can_run(state.name, target):
            return f"{state.name} computes in {low[0]} on this CPU, which may be faster than int8: {state.install}"
    return ""


def _can_run(name: str, target: Target) -> bool:
    """Return whether an engine is a plug-in that runs float models on the CPU of `target`, and not a simulator."""
    engine = load_engines()[name]
    own = find_only_engine(engine.int8.backend) == engine
    return bool(engine.module) and "CPU" in engine.devices and not own and exists_for(engine, target)


def _raced(engines: Engines, file: Path, settings: SessionSettings, count: int) -> RacedFile:
    return RacedFile(file, settings, engines.open(file, settings), count)


def _open_rival(engines: Engines, job: Job, float_session: Any, choice: EngineChoice) -> _Rival | None:
    """Open the float model in an engine, and measure its loss. Return None, with a note, if the engine fails."""
    settings = SessionSettings(engine=choice.engine, precision=choice.precision)
    try:
        with job.progress.stage(f"The float model in {choice.name}"):
            # An engine takes seconds to compile a model, so it gets one session.
            raced = _raced(engines, job.prepared.path, settings, 1)
            evaluation = evaluate_sessions(
                {FLOAT: float_session, INT8: raced.session},
                spread_over(job.validation, _SAMPLES),
                task=job.task,
                reference=FLOAT,
                basis=job.basis,
            )
    except EdgeqError as error:
        job.progress.note(f"{choice.name} is not tried: {error.text}")
        return None
    if evaluation.accuracy:
        return _Rival(choice, raced, evaluation.accuracy[INT8].loss_against(evaluation.accuracy[FLOAT]))
    return _Rival(choice, raced, float(10 ** (-worst_db(evaluation.agreement[INT8]) / 10)))


def _is_allowed_by_labels(proof: Proof, limit: float) -> bool:
    return proof.labelled and proof.drop is not None and proof.drop <= limit


def _is_slow(claim: Claim) -> bool:
    return claim.verdict == SLOWER or (claim.estimated is not None and claim.estimated[2] < 1)


def _find_faster(
    latency: Mapping[str, Distribution], name: str, rival: _Rival | None, request: Request, job: Job
) -> FasterForm | None:
    """Return the record of the engine's float model if it is faster than the form `name` and not slower than float32.
    On a busy machine, an estimate counts if its spread is wholly above 1.
    """
    if rival is None or rival.choice.name not in latency:
        return None
    claim = make_claim(latency[name], latency[rival.choice.name])
    if claim.verdict != FASTER and not (claim.verdict == UNKNOWN and claim.estimated and claim.estimated[1] > 1):
        return None
    against = make_claim(latency[FLOAT], latency[rival.choice.name])
    about = against.interval or against.estimated
    if about is None or about[0] < 1:
        return None
    count, title = min(_SAMPLES, len(job.validation)), f"the float model in {rival.choice.name}"
    lost = f"{100 * max(rival.loss, 0.0):.2f} points lost" if job.task is not None else _describe_noise(rival.loss)
    command = f"{_tune(request)} ⟨engine⟩ {rival.choice.name}"
    sentence = (
        f"{claim.sentence(title, INT8)}, and at {about[0]:.2f} times float32's; {lost} on {count} samples: `{command}`"
    )
    return FasterForm(title, against, rival.loss, count, command, sentence)


def _describe_noise(noise: float) -> str:
    return f"{-10 * math.log10(noise):.1f} dB SQNR" if noise > 0 else "no noise"


def _describe_float(ratio: Claim, request: Request) -> FasterForm | None:
    """Return the record of float32 itself if it is certainly faster than the build."""
    if ratio.verdict != SLOWER:
        return None
    command = _tune(request)
    sentence = f"{ratio.sentence(INT8, FLOAT)}: deploy {request.model} itself, or search further: `{command}`"
    return FasterForm(FLOAT, None, 0.0, 0, command, sentence)


def _tune(request: Request) -> str:
    """Return the command that compares all engines for the model of a request."""
    source = request.data.source if request.data is not None else None
    data = shlex.quote(str(source)) if isinstance(source, str | PathLike) else "SAMPLES"
    return f"edgeq tune {shlex.quote(str(request.model))} ⟨data⟩ {data} ⟨output⟩ BUNDLE"
