"""Find out which layers a plug-in engine executed. Engines add them to ONNX Runtime's profile, each in its own form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.measure.kernels import KernelRun, read_kernel_runs
from edgeq.run.engines import Engine, ExecutionGraph
from edgeq.run.session import Engines, SessionSettings


@dataclass(frozen=True)
class EngineLayer:
    """Describe one layer that an engine executed.

    Attributes:
        name: name of the node that the layer was made from, if the engine keeps names.
        op_type: the engine's name for the operator.
        kernel: name of the kernel that ran.
        precision: "int8", another of the engine's precisions, or "" if the kernel's name does not show it.
        merged: names of all nodes that the layer was made from, if the engine reports them.
    """

    name: str
    op_type: str
    kernel: str
    precision: str
    merged: tuple[str, ...] = ()


def profile_engine(
    model: Path,
    settings: SessionSettings,
    engine: Engine,
    feed: Mapping[str, Any],
    *,
    opener: Callable[[Path, SessionSettings], Any] | None = None,
) -> tuple[tuple[EngineLayer, ...], tuple[KernelRun, ...]]:
    """Return the layers of one inference in the engine, and the kernels of the nodes that the engine left to
    onnxruntime.

    Args:
        engine: the engine of `settings`; its execution graph must be visible.
        feed: one sample.
        opener: function that opens a session in a process of the engine; None starts a process.

    Raises:
        EngineError: the engine crashes or refuses the model.
    """
    with scratch_folder("edgeq-profile-") as folder, ExitStack() as stack:
        # An engine writes its layers to the profile only if its options ask for them.
        watched = replace(
            settings, engine=engine.with_layer_profile(), profile_prefix=Path(folder) / "profile", draws=True
        )
        session = (opener or stack.enter_context(Engines()).open)(model, watched)
        session.run(None, dict(feed))
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
        session.close()
    # Nodes that the engine refused ran in onnxruntime, whose kernels are in the same profile.
    fallback_events = [event for event in events if event.get("args", {}).get("provider") != engine.provider]
    return read_layers(events, engine.graph), read_kernel_runs(fallback_events)


def read_layers(events: Iterable[Mapping[str, Any]], graph: ExecutionGraph) -> tuple[EngineLayer, ...]:
    """Return the layers among the events of a profile, in execution order, each once."""
    layers: dict[str, EngineLayer] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != graph.category or not {graph.operator, graph.kernel} <= args.keys():
            continue
        kernel = str(args[graph.kernel])
        precision = graph.precisions.get(kernel.rpartition("_")[2].lower(), "")
        name = re.sub(graph.renamed, "", str(event["name"])) if graph.renamed else str(event["name"])
        merged = tuple(filter(None, str(args.get(graph.merged, "")).split(",")))
        # A layer that ran several times has several events.
        layers.setdefault(str(event["name"]), EngineLayer(name, str(args[graph.operator]), kernel, precision, merged))
    return tuple(layers.values())
