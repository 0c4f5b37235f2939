"""Remember what runs of `edgeq tune` found on this machine, and try it first on the next model with the same kinds of
layers.

A finished run leaves evidence: the winner, its speed, and the kinds of operators in the model's arithmetic. A run on a
similar model begins with a narrowed search: the kernels, the engine and the calibration methods that won before, and
the profile's own choice. All of them are measured as usual. If the winner is clearly slower than the evidence promises,
or nothing keeps the accuracy, edgeq searches the whole space, without repeating measurements.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.measure.claim import UNKNOWN
from edgeq_device.system.files import read_file

from edgeq.errors import EdgeqError, OutputError, one_line
from edgeq.hardware.profile import Profile
from edgeq.model.graph import sizes
from edgeq.model.macs import node_macs
from edgeq.scheme import Scheme
from edgeq.tuning.engines import Field
from edgeq.tuning.pace import BEHIND
from edgeq.tuning.sentences import describe_unclaimed
from edgeq.tuning.space import Candidate, engine_name
from edgeq.tuning.trials import Outcome, Trial
from edgeq.util.display import Progress
from edgeq.util.folders import user_folder
from edgeq.util.outputs import output_file
from edgeq.util.records import fingerprint, parse, plain

SCHEMA = "edgeq.tuning-memory/1"
FILE = "tuning-memory.json"
# Two models are similar if at least this share of their multiply-accumulates is in the same kinds of layers. For
# MobileNet v1 and v2, the share is 0.95.
_SIMILAR_SHARE = 0.8
_MAX_USED, _MAX_RECORDS, _MAX_BYTES = 3, 200, 2**20
# The settings of a run (`edgeq.tuning.run_settings.settings_of`) that describe the machine, the versions and the goal.
_SETTING_KEYS = ("target", "profile", "machine", "objective", "version", "set_of_engines")


@dataclass(frozen=True)
class WinRecord:
    """Record what won on one model.

    Attributes:
        model: name of the model's file.
        digest: digest of the prepared model.
        setting: digest of the machine, the versions and the objective.
        operators: share of the multiply-accumulates by kind of layer.
        scheme: the winner's scheme, without the names of its layers.
        builder, recoveries, engine: the winner's values, as in `Candidate`.
        speedup: estimated speed, relative to float32's best.
        max_drop: the allowed loss. Under a stricter goal, a slower candidate would win.
    """

    model: str
    digest: str
    setting: str
    operators: Mapping[str, float]
    scheme: Scheme
    builder: str
    recoveries: tuple[str, ...]
    engine: str
    speedup: float
    max_drop: float

    def likeness(self, operators: Mapping[str, float]) -> float:
        """Return the share (0 to 1) of the multiply-accumulates that is in kinds of layers that both models have."""
        return sum(min(share, operators.get(kind, 0.0)) for kind, share in self.operators.items())


@dataclass(frozen=True)
class _MemoryFile:
    schema: str = SCHEMA
    evidence: tuple[WinRecord, ...] = ()


@dataclass(frozen=True)
class Space:
    """Describe where a search begins: the candidates (the most promising first), the profile with its search table, and
    the engines to time.
    """

    candidates: tuple[Candidate, ...]
    profile: Profile
    field: Field


@dataclass(frozen=True)
class Memory:
    """Hold the evidence of one setting.

    Attributes:
        path: the file; None if nothing is to be remembered.
        setting: digest of the machine, the versions and the objective.
        max_drop: the allowed loss.
        operators: share of the multiply-accumulates by kind of layer.
        evidence: evidence of similar models, the most similar first.
        digest: digest of the prepared model.
    """

    path: Path | None = None
    setting: str = ""
    max_drop: float = 0.0
    operators: Mapping[str, float] = field(default_factory=dict)
    evidence: tuple[WinRecord, ...] = ()
    digest: str = ""

    def narrow(self, space: Space) -> Space | None:
        """Return the part of `space` that won before, plus the first candidate of `space`. Return None if there is no
        evidence for any part, or if that part would be all of `space`.
        """
        # Compare kernels only: ranges and layers in float belong to the other model, and are searched for this one.
        won = [
            c
            for e in self.evidence
            for c in space.candidates
            if _kernel(c.scheme, c.builder) == _kernel(e.scheme, e.builder)
        ]
        if not self.evidence or not (won or any(e.scheme.mode == "float" for e in self.evidence)):
            return None
        methods = {e.scheme.method for e in self.evidence}
        search = dict(space.profile.search)
        if "method" in search:
            search["method"] = tuple(m for m in search["method"] if m in methods)
        engines = {e.engine for e in self.evidence}
        # Engines that won nothing are not timed, because opening each of them may take seconds.
        left_out = {choice.engine.name for choice in space.field.plugins} - engines
        candidates = tuple({c.name: c for c in (*won, *space.candidates[:1])}.values())
        narrow_space = Space(candidates, replace(space.profile, search=search), space.field.without(left_out))
        return None if narrow_space == space else narrow_space

    def is_confirmed_by(self, outcome: Outcome) -> bool:
        """Return whether a narrowed search found a winner about as fast as the evidence promised."""
        promise = min((e.speedup for e in self.evidence), default=0.0)
        return outcome.winner is not None and _speedup(outcome.winner) * (1 + BEHIND) >= promise

    def describe_unclaimed(self, outcome: Outcome) -> str:
        """Return why a narrowed search could neither confirm nor refute the evidence: a candidate keeps the accuracy,
        but its speed cannot be claimed. Return "" if the speeds of all such candidates can be claimed.
        """
        assessments = ((t, t.final_assessment) for t in outcome.trials)
        return describe_unclaimed(
            *(t for t, a in assessments if a is not None and a.complete and a.bound <= self.max_drop)
        )

    def with_earlier_claim(self, outcome: Outcome) -> Outcome:
        """Return `outcome` with the speed that an earlier run claimed for the same kernels of the same model in the
        same engine, if there was such a run. If this run can claim a speed for its choice, return `outcome` unchanged.
        """
        winner = outcome.winner
        if winner is None or winner.verdict != UNKNOWN:
            return outcome
        candidate = winner.candidate
        key = _kernel(candidate.scheme, candidate.builder), engine_name(candidate)
        records = (e for e in self.evidence if e.digest == self.digest)
        speedups = (e.speedup for e in records if (_kernel(e.scheme, e.builder), e.engine) == key)
        return replace(outcome, earlier=next(speedups, None))

    def remember(self, model: str, digest: str, outcome: Outcome, progress: Progress) -> None:
        """Add the winner of a run to the file, and replace earlier evidence for the same model and goal.

        A run that the budget cut short is not evidence, because something better may not have been tried. A winner that
        does not certainly meet the goal is not evidence either.
        """
        winner = outcome.winner
        if self.path is None or winner is None or outcome.out_of_time or _speedup(winner) <= 1:
            return
        # A winner that only comes near the goal would mislead the next run.
        if winner.loss > self.max_drop:
            return
        candidate = winner.candidate
        scheme = candidate.scheme.replace(exclude=(), wide=(), eight_bit=())
        new = WinRecord(
            model=model,
            digest=digest,
            setting=self.setting,
            operators=self.operators,
            scheme=scheme,
            builder=candidate.builder,
            recoveries=candidate.recoveries,
            engine=engine_name(candidate),
            speedup=_speedup(winner),
            max_drop=self.max_drop,
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # If two runs end at the same moment, the evidence of one is lost.
            key = (digest, self.setting, self.max_drop)
            records = [e for e in _load_records(self.path, progress) if (e.digest, e.setting, e.max_drop) != key]
            content = _MemoryFile(evidence=(*records[1 - _MAX_RECORDS :], new))
            with output_file(self.path, force=True) as draft:
                draft.write_text(json.dumps(plain(content), indent=1) + "\n", "utf-8")
        except (OSError, OutputError) as error:
            progress.note(f"the result of this run is not remembered: {one_line(error)}")


def memory_file() -> Path | None:
    """Return the file that keeps the evidence of this user's runs; None for a user without a home folder."""
    folder = user_folder("state")
    return folder / FILE if folder is not None else None


def recall(
    path: Path | None, model: ir.Model, settings: Mapping[str, Any], max_drop: float, progress: Progress
) -> Memory:
    """Return the evidence of models similar to `model`.

    Args:
        path: the file; None if nothing is to be remembered.
        settings: settings of the run, from `edgeq.tuning.run_settings.settings_of`.
        max_drop: the allowed loss; evidence of runs that allowed less is left out.
    """
    setting = fingerprint({key: settings.get(key) for key in _SETTING_KEYS})
    operators = layer_kinds(model)
    records = _load_records(path, progress) if path is not None else ()
    matches = [e for e in records if e.setting == setting and e.max_drop >= max_drop]
    likely = (e for e in matches if e.likeness(operators) >= _SIMILAR_SHARE)
    ranked = sorted(likely, key=lambda e: (e.digest != settings.get("model"), -e.likeness(operators)))
    return Memory(path, setting, max_drop, operators, tuple(ranked[:_MAX_USED]), str(settings.get("model", "")))


def layer_kinds(model: ir.Model) -> dict[str, float]:
    """Return each operator's share of the multiply-accumulates. Convolutions are split by form: grouped, pointwise, and
    others.
    """
    macs = node_macs(model)
    macs_by_kind: Counter[str] = Counter()
    for node in model.graph:
        macs_by_kind[_kind(node)] += macs.get(node.name or "", 0)
    total = sum(macs_by_kind.values())
    return {kind: round(count / total, 4) for kind, count in sorted(macs_by_kind.items()) if count}


def _kind(node: ir.Node) -> str:
    if node.op_type != "Conv":
        return node.op_type
    shape = sizes(node.inputs[1]) or ()
    if node.attributes.get_int("group", 1) > 1:
        return "Conv, grouped"
    return "Conv, pointwise" if shape and set(shape[2:]) == {1} else "Conv"


def _load_records(path: Path, progress: Progress) -> tuple[WinRecord, ...]:
    """Return the evidence in a file. If the file is damaged, show a note and return nothing."""
    if not path.exists():
        return ()
    try:
        # The file lies in the user's home, where anything may have written to it.
        if path.stat().st_size > _MAX_BYTES:
            raise OutputError(f"{path} is larger than edgeq ever writes it")
        content: _MemoryFile = parse(json.loads(read_file(path)), _MemoryFile, path)
    except (OSError, ValueError, EdgeqError, RecursionError) as error:
        progress.note(f"the results of earlier runs are ignored: {one_line(error)}")
        return ()
    return content.evidence if content.schema == SCHEMA else ()


def _kernel(scheme: Scheme, builder: str) -> tuple[Scheme, str]:
    """Return the part of a candidate that decides its speed. This part contains neither the ranges nor the layers that
    are kept in float.
    """
    plain_scheme = Scheme()
    common = {"method": plain_scheme.method, "method_options": {}, "exclude": (), "wide": (), "eight_bit": ()}
    return scheme.replace(**common), builder


def _speedup(trial: Trial) -> float:
    claim = trial.timing.speedup if trial.timing else None
    return claim.estimate if claim is not None and claim.estimate is not None else 0.0
