"""The layers that a plug-in engine really executes: it compiles a model into one node of onnxruntime's graph, and
enters what that node consists of into onnxruntime's profile."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq.engines import Engine, ExecutionGraph
from edgeq.measure.profile import KernelRun, kernel_runs
from edgeq.session import SessionSettings
from edgeq.workers.engine import Engines


@dataclass(frozen=True)
class EngineLayer:
    """One layer that was executed.

    Attributes:
        name: of the node that it was made of, as far as the engine keeps names.
        op_type: as the engine calls it.
        kernel: the name of what ran it.
        precision: "int8", one of the engine's precisions, or "" where it computes in neither.
    """

    name: str
    op_type: str
    kernel: str
    precision: str


def engine_profile(
    model: Path,
    settings: SessionSettings,
    engine: Engine,
    feed: Mapping[str, Any],
    *,
    opener: Callable[[Path, SessionSettings], Any] | None = None,
) -> tuple[tuple[EngineLayer, ...], tuple[KernelRun, ...]]:
    """The layers of one inference in the engine, and the kernels of what it left to onnxruntime.

    Args:
        engine: that of `settings`, whose graph can be seen.
        feed: one sample.
        opener: opens a session in a process of the engine; None starts one.

    Raises:
        EngineError: the engine crashes or refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="edgeq-profile-") as folder, ExitStack() as stack:
        watched = replace(settings, engine=engine.watched(), profile_prefix=Path(folder) / "profile")
        session = (opener or stack.enter_context(Engines()).open)(model, watched)
        session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        session.close()
    own = [event for event in events if event.get("args", {}).get("provider") != engine.provider]
    return layers_of(events, engine.graph), kernel_runs(own)


def layers_of(events: Iterable[Mapping[str, Any]], graph: ExecutionGraph) -> tuple[EngineLayer, ...]:
    """The layers among the events of a profile, in the order of execution, each once."""
    found: dict[str, EngineLayer] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != graph.category or not {graph.operator, graph.kernel} <= args.keys():
            continue
        kernel = str(args[graph.kernel])
        precision = graph.precisions.get(kernel.rpartition("_")[2].lower(), "")
        name = re.sub(graph.renamed, "", str(event["name"])) if graph.renamed else str(event["name"])
        found.setdefault(str(event["name"]), EngineLayer(name, str(args[graph.operator]), kernel, precision))
    return tuple(found.values())
