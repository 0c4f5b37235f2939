"""From things that can be opened to a report: pin, open, measure memory, find samples, run the benchmark.

What `edgeq bench` and `edgeq_run.py bench` have in common, whatever it is that they open.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from edgeq_device.bench import OnProgress, Report, run_bench
from edgeq_device.bench_settings import BenchSettings
from edgeq_device.environment import pinned
from edgeq_device.errors import DataError, RuntimeUnavailableError
from edgeq_device.feeds import random_feeds
from edgeq_device.memory import MemoryUse
from edgeq_device.scenarios import Feed

Shapes = Mapping[str, Tuple[int, ...]]


@dataclass(frozen=True)
class BenchModel:
    """One model to measure.

    Attributes:
        name: what it is called in the report.
        open: gives a session when called with the number of intra-op threads (0: onnxruntime's choice).
        memory: measures its memory in a process of its own, given threads and input shapes; None leaves it out.
        sessions: in how many sessions it is timed, which take turns: see `latency.Runners`.
    """

    name: str
    open: Callable[[int], Any]
    memory: Optional[Callable[[int, Shapes], MemoryUse]] = None
    sessions: int = 1


def bench_models(
    models: Sequence[BenchModel],
    settings: BenchSettings,
    *,
    feeds: Optional[Callable[[Any], Sequence[Feed]]] = None,
    shapes: Optional[Shapes] = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda scenario, share: None,
) -> Report:
    """Open the models and measure them side by side.

    Args:
        settings: with `pin` and no `threads`, one thread a pinned core is used: onnxruntime's own choice counts all
            cores of the machine, and would place its threads on those too.
        feeds: gives the samples, called with the first session; None makes them up from its signature.
        shapes: of inputs with open sizes, for made-up samples.
        notes: what is worth reporting of how the models were chosen.

    Returns:
        `run_bench`'s report.

    Raises:
        UsageError, DataError: see `run_bench`; DataError too where the models do not take the same inputs.
        Whatever `BenchModel.open` raises.
    """
    settings.check()
    import numpy
    import onnxruntime

    modules = {"onnxruntime": onnxruntime, "numpy": numpy}
    versions = {"python": platform.python_version(), **{name: str(m.__version__) for name, m in modules.items()}}
    settings = replace(settings, threads=settings.threads or len(settings.pin))
    found: List[str] = []
    with pinned(settings.pin):
        sessions = {bench_model.name: bench_model.open(settings.threads) for bench_model in models}
        more = {m.name: [m.open(settings.threads) for _ in range(m.sessions - 1)] for m in models}
        found += [note for session in sessions.values() for note in getattr(session, "notes", ())]
        _check_same_inputs(sessions)
        first = next(iter(sessions.values()))
        samples = list(feeds(first) if feeds else random_feeds(first, shapes))
        actual = {name: tuple(value.shape) for name, value in samples[0].items()} if samples else {}
        memory: Dict[str, Dict[str, int]] = {}
        for bench_model in models:
            if bench_model.memory is None:
                continue
            try:
                memory[bench_model.name] = bench_model.memory(settings.threads, actual).to_dict()
            except RuntimeUnavailableError as error:
                found.append(str(error))
        report = run_bench(
            sessions, samples, settings, more=more, memory=memory, versions=versions, on_progress=on_progress
        )
    if feeds is None:
        found.append(_how_made_up(first, shapes or {}, actual))
    report["notes"] = [*notes, *report["notes"], *found]
    return report


def _how_made_up(session: Any, shapes: Shapes, actual: Shapes) -> str:
    opened = [i.name for i in session.get_inputs() if not all(isinstance(size, int) for size in i.shape[1:])]
    sized = [f"{name} of {','.join(map(str, actual[name]))}" for name in opened if name not in shapes]
    how = f", with 1 for open sizes ({'; '.join(sized)}; --shape NAME=SIZES sets others)" if sized else ""
    return f"the inputs were made up (random values{how}); give data to time real ones"


def _check_same_inputs(sessions: Mapping[str, Any]) -> None:
    described = {name: sorted((i.name, i.type) for i in s.get_inputs()) for name, s in sessions.items()}
    first = next(iter(described))
    for name, inputs in described.items():
        if inputs != described[first]:
            left, right = (", ".join(f"{n}: {t}" for n, t in described[k]) for k in (first, name))
            raise DataError(
                f"{first} takes {left}, and {name} takes {right}", "Compare models that take the same inputs"
            )
