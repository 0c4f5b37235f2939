"""What a run of `edgeq tune` starts from: its target, the kernel choices and their order; `--dry-run` lists them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq.backends.base import backend_named
from edgeq.data.files import check_there
from edgeq.data.open_source import Data
from edgeq.errors import HardwareError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, resolve
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.run.engines import DEFAULT, EngineChoice
from edgeq.tune.engines import Field, find_field, with_entrants
from edgeq.tune.goal import Goal
from edgeq.tune.recover.methods import recovery_groups
from edgeq.tune.space import Candidate, kernel_candidates, method_candidates, thread_counts
from edgeq.util.display import SILENT, Progress

# Share of a model's multiply-accumulates from which on quantizing activations at run time is worth a try.
_DYNAMIC_SHARE = 0.5


@dataclass(frozen=True)
class Plan:
    """What a run would try: `--dry-run`.

    Attributes:
        candidates: kernel choices, in the order in which they are built.
        methods: names of the candidates with other calibration methods, as the first kernel choice would have them.
        recoveries: names of accuracy recoveries, in the order in which they are tried.
        threads: numbers that are compared; 0 is all cores. Empty where the target is simulated and nothing is timed.
        engines: what runs them.
    """

    target: Target
    goal: Goal
    candidates: tuple[Candidate, ...]
    methods: tuple[str, ...]
    recoveries: tuple[str, ...]
    threads: tuple[int, ...]
    engines: Field

    def __record__(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "target": self.target.name,
            "profile": self.target.profile.name,
            "goal": self.goal,
            "candidates": self.candidates,
            "methods": self.methods,
            "recoveries": self.recoveries,
            "threads": self.threads,
            "engines": [*([DEFAULT] if self.engines.own else []), *self.engines.plugins],
        }


def plan(
    model: Path,
    data: Data | None,
    *,
    validation: Data | None = None,
    target: str | Path = "auto",
    goal: Goal | None = None,
    statistics: Path | None = None,
    engines: Sequence[EngineChoice] = (),
    progress: Progress = SILENT,
) -> Plan:
    """The candidates that `tune` would start from, without building anything. Samples have to be there, and are not
    read.

    Raises:
        DataError: no file is where the samples should be.
        HardwareError: an unknown target, or one that neither runs nor is simulated here.
    """
    for given in (data, validation):
        if given is not None and isinstance(given.source, str | Path):
            check_there(given.source)
    machine = detect_machine()
    chosen, timed = resolve_timed(target, machine)
    goal, raced = goal or Goal(), find_field(chosen, machine, engines, timed=timed, progress=progress)
    with tempfile.TemporaryDirectory(prefix="edgeq-tune-") as folder:
        prepared = prepare_model(model, Path(folder), progress=progress)
        first = kernel_choices(prepared, chosen, static=is_static(chosen, data, statistics))
    methods = method_candidates(first[0], chosen.profile) if first else ()
    editable = timed or backend_named(chosen.backend).recoverable
    return Plan(
        target=chosen,
        goal=goal,
        candidates=with_entrants(first, raced, unquantized=goal.objective != "size"),
        methods=tuple(c.name for c in methods),
        recoveries=tuple(name for group in recovery_groups() for name in group) if editable else (),
        threads=thread_counts(machine.usable_threads) if timed else (),
        engines=raced,
    )


def resolve_timed(target: str | Path, machine: Machine) -> tuple[Target, bool]:
    """The target, and whether its kernels run here, so that they can be timed.

    Raises:
        HardwareError: it is unknown, or neither runs nor is simulated here.
    """
    chosen = resolve(target, machine)
    lacks = chosen.profile.missing(machine)
    if lacks and not backend_named(chosen.backend).simulated:
        raise HardwareError(
            f"{chosen.name} does not run here: this machine lacks {', '.join(lacks)}, and tuning measures latencies",
            "Run edgeq tune on the device, or `edgeq package` for it here",
        )
    return chosen, not lacks


def is_static(target: Target, data: Data | None, statistics: Path | None) -> bool:
    """Whether ranges are derived before the build: where there is data for it, or nothing else that could be built."""
    return data is not None or statistics is not None or not target.profile.scheme.dynamic_weight_types


def kernel_choices(prepared: PreparedModel, target: Target, *, static: bool) -> tuple[Candidate, ...]:
    """The target's kernel choices for a model, the profile's own first.

    Args:
        static: whether ranges are derived before the build.
    """
    macs = node_macs(prepared.model)
    types = target.profile.scheme.dynamic_weight_types
    dynamic = sum(macs.get(node.name or "", 0) for node in prepared.model.graph if node.op_type in types)
    worthwhile = dynamic > _DYNAMIC_SHARE * sum(macs.values())
    return kernel_candidates(target.profile, static=static, dynamic=worthwhile or not static)


def promising_first(kernels: Sequence[Candidate], extra: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """All candidates, so ordered that a short budget is spent on the right ones.

    What is made for this kind of model comes early: matrix products of such a model bear ranges that are
    measured at run time better than fixed ones.
    """
    if not extra:
        return tuple(kernels)
    dynamic = [c for c in kernels if c.scheme.mode == "dynamic"]
    return (*dynamic, *extra, *(c for c in kernels if c not in dynamic))
