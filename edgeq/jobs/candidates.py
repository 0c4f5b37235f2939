"""List the candidates with which a search begins, for one target and one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.backends.base import backend_named
from edgeq.data.open_source import check_source
from edgeq.errors import HardwareError
from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.target import Target, resolve
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.prove.request import Request
from edgeq.run.engines import DEFAULT, EngineChoice
from edgeq.tuning.engines import Field, add_entrants, find_field
from edgeq.tuning.goal import Goal
from edgeq.tuning.recover.methods import recovery_groups
from edgeq.tuning.space import WORTH_A_TRY, Candidate, kernel_candidates, method_candidates, thread_counts


@dataclass(frozen=True)
class CandidateList:
    """Describe the candidates of a run, without building any.

    Attributes:
        candidates: kernel choices, in the order in which they are built.
        methods: names of the candidates that combine the first kernel choice with other calibration methods.
        recoveries: names of accuracy recoveries, in the order in which they are tried.
        threads: numbers of threads to compare; 0 means all cores. It is empty if the target is simulated, because
            nothing is timed.
        engines: the engines that run the candidates.
    """

    target: Target
    goal: Goal
    candidates: tuple[Candidate, ...]
    methods: tuple[str, ...]
    recoveries: tuple[str, ...]
    threads: tuple[int, ...]
    engines: Field

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
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


def plan(request: Request, *, goal: Goal | None = None, engines: Sequence[EngineChoice] = ()) -> CandidateList:
    """Return the candidates with which `tune` would begin, without building any of them. The samples must exist, but
    are not read.

    Raises:
        DataError: there is no file at the path of the samples.
        HardwareError: the target is unknown, or cannot run or be simulated here.
    """
    check_samples(request)
    machine = detect_machine()
    target, timed = resolve_timed(request, machine)
    # Without data, the limit is that of a task by labels.
    goal = (goal or Goal()).settled(request.task)
    field = find_field(target, machine, engines, timed=timed, progress=request.progress)
    with scratch_folder("edgeq-tune-") as folder:
        prepared = prepare_model(request.model, Path(folder), progress=request.progress)
        kernels = kernel_choices(prepared, target, static=is_static(request, target))
    methods = method_candidates(kernels[0], target.profile) if kernels else ()
    editable = timed or backend_named(target.backend).recoverable
    return CandidateList(
        target=target,
        goal=goal,
        # The float model competes in other engines too, unless size decides, which no engine changes.
        candidates=add_entrants(kernels, field, unquantized=goal.objective != "size"),
        methods=tuple(c.name for c in methods),
        recoveries=tuple(name for group in recovery_groups() for name in group) if editable else (),
        threads=thread_counts(machine.usable_threads) if timed else (),
        engines=field,
    )


def check_samples(request: Request) -> None:
    """Refuse samples that do not exist, before hours of work."""
    for data in (request.data, request.val):
        if data is not None and isinstance(data.source, str | Path):
            check_source(data.source)


def resolve_timed(request: Request, machine: Machine) -> tuple[Target, bool]:
    """Return the request's target and whether it can be timed, which means that its kernels run on this machine.

    Raises:
        HardwareError: the target is unknown, or cannot run or be simulated here.
    """
    target = resolve(request.only_target(), machine)
    lacks = target.profile.missing(machine)
    if lacks and not backend_named(target.backend).simulated:
        raise HardwareError(
            f"{target.name} does not run here: this machine lacks {', '.join(lacks)}, and tuning measures latencies",
            "Run edgeq tune on the device, or `edgeq package` for it here",
        )
    return target, not lacks


def is_static(request: Request, target: Target) -> bool:
    """Return whether ranges are derived before the build. This is so if there are data from which to derive them, or if
    the target supports no other kind of build.
    """
    sources = request.data is not None or request.statistics is not None
    return sources or not target.profile.scheme.dynamic_weight_types


def kernel_choices(prepared: PreparedModel, target: Target, *, static: bool) -> tuple[Candidate, ...]:
    """Return the target's kernel choices for a model. The profile's own choice is first.

    Args:
        static: whether ranges are derived before the build.
    """
    macs = node_macs(prepared.model)
    types = target.profile.scheme.dynamic_weight_types
    dynamic = sum(macs.get(node.name or "", 0) for node in prepared.model.graph if node.op_type in types)
    worthwhile = dynamic > WORTH_A_TRY * sum(macs.values())
    return kernel_candidates(target.profile, static=static, dynamic=worthwhile or not static)


def promising_first(kernels: Sequence[Candidate], extra: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return all candidates, in an order that spends a short budget on the most promising ones.

    `extra` contains the candidates for sequence models, or nothing for other models. If it is not empty, dynamic
    candidates come first, because ranges measured at run time suit the matrix products of sequence models better than
    fixed ranges. Those in `extra` come second.
    """
    if not extra:
        return tuple(kernels)
    dynamic = [c for c in kernels if c.scheme.mode == "dynamic"]
    return (*dynamic, *extra, *(c for c in kernels if c not in dynamic))
