"""What runs in int8 on a target: measured on its own kernels wherever those run here, else a forecast by rules. What a
plug-in runs is measured in the plug-in, or not known.

Another CPU's fusions say nothing: ONNX Runtime's optimiser fuses int8 convolutions on one architecture that it leaves
in float on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import onnx_ir as ir

from edgeq.backends import backend_named
from edgeq.backends.base import TargetedBackend
from edgeq.emulate.engine_route import route_for
from edgeq.emulate.routes import EMULATED, NATIVE, ExecutionRoute
from edgeq.engines import Engine
from edgeq.errors import BoardError, CheckFailedError, EdgeqError, RuntimeUnavailableError
from edgeq.hardware.machine import Machine
from edgeq.hardware.target import Target, runs_natively
from edgeq.measure.coverage import Basis, Coverage, Explain, forecast_coverage, measure_coverage
from edgeq.measure.node_runs import sized_macs
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules, rules_title
from edgeq.pipeline.job import Built, Job
from edgeq.pipeline.proof import unchecked
from edgeq.pipeline.reasons import explainer
from edgeq.progress import SILENT, Progress
from edgeq.workers.guest import REQUEST_S

_LEFT_OUT = "--no-emulate leaves its kernels out"
_NOTED_S = 60.0


def target_coverage(
    job: Job,
    built: Built,
    machine: Machine,
    *,
    emulate: bool = True,
    route: ExecutionRoute | None = None,
    progress: Progress = SILENT,
) -> Coverage:
    """The coverage of `built` on its target.

    Args:
        machine: this one.
        route: to the target's kernels, where it is known: a board of that kind.
        emulate: whether the target's kernels are emulated where that is possible.

    Raises:
        CheckFailedError: the target's own kernels refuse it.
        RuntimeUnavailableError: this machine's do, for a target that this machine is.
    """
    if built.artifact.coverage is not None:
        return built.artifact.coverage
    target, feed, source = built.target, next(iter(job.validation)).inputs, job.prepared.model
    rules = int8_rules(target.backend)
    predicted = predict_int8(source, rules, built.artifact.scheme, hazards=job.prepared.hazards)
    explain = explainer(built, predicted)
    if route is None and runs_natively(target, machine):
        with progress.stage("What runs in int8"):
            return measure_coverage(built.artifact.model, built.artifact.settings(), feed, source, explain)
    if route is None:
        route = route_for(target, machine, built.artifact.settings().engine, progress=progress)
    reason = _why_not(route, emulate=emulate)
    if not reason and route.speed is not None:
        about = forecast_coverage(predicted, sized_macs(source, feed), rules_title(target.backend), "")
        reason = too_slow(route, about, 1, target, progress)
    if not reason:
        found = _measure(built, route, feed, source, explain, progress)
        if isinstance(found, Coverage):
            return found
        reason = found
    if built.artifact.plugin is not None:
        return Coverage(basis="unknown", how=reason)
    return forecast_coverage(predicted, sized_macs(source, feed), rules_title(target.backend), reason)


def check_measurable(
    targets: Iterable[Target], machine: Machine, *, engine: Engine | None = None, emulate: bool = True
) -> None:
    """Refuse a bar on the coverage of targets whose kernels, or those of `engine` for them, cannot be run here, before
    any work is done.

    Raises:
        RuntimeUnavailableError: names the first, and what to do.
    """
    for target in targets:
        if runs_natively(target, machine) or isinstance(backend_named(target.backend), TargetedBackend):
            continue  # a compiler of edgeq's own knows what it placed where
        reason = _why_not(route_for(target, machine, engine), emulate=emulate)
        if reason:
            raise unchecked(f"{target.name}: {reason}")


def too_slow(route: ExecutionRoute, coverage: Coverage, inferences: int, target: Target, progress: Progress) -> str:
    """Why the target's kernels are not waited for; "" where they are, after a note where that takes a minute or more.

    Args:
        coverage: of the model, for its multiply-accumulates.
    """
    one = route.seconds(coverage.int8_macs, coverage.float_macs)
    if one > REQUEST_S:
        return f"one inference would take about {one / 3600:.1f} h on {route.how}"
    if one * inferences >= _NOTED_S:
        takes = f"running it on {route.how} takes about {one * inferences / 60:.0f} min"
        progress.note(f"{target.name}: {takes}; --no-emulate leaves that out")
    return ""


def _why_not(route: ExecutionRoute, *, emulate: bool) -> str:
    """Why the target's kernels are not run; "" where they are."""
    if route.where not in (NATIVE, EMULATED) or route.start is None:
        return route.reason or f"{route.how} has no kernels to look at"
    return "" if emulate or route.where == NATIVE else _LEFT_OUT


def _measure(
    built: Built, route: ExecutionRoute, feed: Mapping[str, Any], source: ir.Model, explain: Explain, progress: Progress
) -> Coverage | str:
    """The coverage by running it as `route` says; or why the kernels could not be started."""
    assert route.start is not None
    settings = built.artifact.settings(threads=0 if route.native_speed else 1)
    basis: Basis = "native" if route.where == NATIVE else "emulated"
    with ExitStack() as stack:
        stack.enter_context(progress.stage(f"Coverage on {route.how}"))
        try:
            opener = stack.enter_context(route.start()).open
        except BoardError:  # it says nothing of the model
            raise
        except EdgeqError as error:
            return str(error)
        try:
            model = built.artifact.model
            return measure_coverage(model, settings, feed, source, explain, basis=basis, how=route.how, opener=opener)
        except BoardError:  # it says nothing of the model
            raise
        except (RuntimeUnavailableError, ValueError) as error:
            raise CheckFailedError(
                f"the model fails on {built.target.name} ({route.how}): {error}",
                "Do not deploy it there; choose another scheme",
            ) from error
