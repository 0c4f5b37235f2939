"""Measure latency and throughput of models on this machine: edgeq_device's benchmark, fed with edgeq's sessions.

The measuring itself lives in `edgeq_device`, which travels in bundles, so that a workstation and a device run the same
code. Its interface here is `measure_models`, and `Measurement`, the report as a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeq_device.bench import BenchSettings, OnProgress, bench_lines
from edgeq_device.bench_models import BenchModel, Shapes, bench_models
from edgeq_device.claim import FEWEST_SESSIONS, Claim
from edgeq_device.memory import MemoryUse, measure_memory
from edgeq_device.scenarios import Feed

from edgeq.model.load import model_bytes
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_request, open_session, with_carried
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.registry import device_errors

_SMALL_BYTES = 2**25


@dataclass(frozen=True)
class Measurement(Page):
    """Hold a latency measurement and its conditions; keys as docs/bench.md lists them.

    Attributes:
        machine: CPU, architecture, system, cores, governors.
        versions: of Python, onnxruntime and numpy.
        settings: durations, counts, scenarios, threads, cores, seed.
        models: by name: execution providers and memory.
        scenarios: by name: for each model its figures, and the ratios against the baseline.
        notes: what may have disturbed the figures, and what they leave out.
        report: all of it, plain values.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    models: Mapping[str, Any]
    scenarios: Mapping[str, Any]
    notes: tuple[str, ...]
    report: Mapping[str, Any]

    def latency(self, name: str, scenario: str = "single-stream") -> Mapping[str, float]:
        """Return the figures of one model: count, min_ms, p50_ms, p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv,
        samples_per_s.
        """
        figures: Mapping[str, float] = self.scenarios[scenario]["models"][name]["latency"]
        return figures

    def ratio(self, name: str, scenario: str = "single-stream") -> Mapping[str, Any]:
        """Return how many times faster `name` is than the baseline: estimate, low, high, confidence, pairs,
        baseline_ms, ms, reason, verdict (`edgeq_device.claim`)."""
        ratio: Mapping[str, Any] = self.scenarios[scenario]["ratios"][name]
        return ratio

    def __brief__(self) -> dict[str, Any]:
        p50 = {
            f"{model}, {name}, p50 ms": found["latency"]["p50_ms"]
            for name, scenario in self.scenarios.items()
            for model, found in scenario["models"].items()
        }
        return {**p50, "notes": self.notes}

    def __page__(self) -> dict[str, Any]:
        return {"name": ", ".join(self.models), "bench": self.report}

    def __record__(self) -> Mapping[str, Any]:
        return self.report

    def text(self, *, verbose: bool = False) -> str:
        """Return the table for people."""
        return "\n".join(bench_lines(self.report, verbose=verbose))


def speed_of(found: Measurement, name: str) -> Claim:
    """Return what can be claimed of the speed of `name` against the baseline, run singly."""
    return Claim.read(found.ratio(name))


def bench_model(
    name: str,
    model: Path,
    settings: SessionSettings | None = None,
    open_it: Callable[[Path, SessionSettings], Any] = open_session,
) -> BenchModel:
    """Return a model file to measure, opened with `settings` (whose thread count the benchmark's replaces).

    Args:
        open_it: how; `edgeq.run.session.Engines.open` puts plug-in engines into processes of their own.
    """
    base = with_carried(model, settings or SessionSettings())

    def open_with(threads: int) -> Any:
        return open_it(model, replace(base, intra_op_threads=threads))

    def memory(threads: int, shapes: Shapes) -> MemoryUse:
        return session_memory(model, replace(base, intra_op_threads=threads), shapes)

    return BenchModel(name, open_with, memory)


def session_memory(model: Path, settings: SessionSettings, shapes: Mapping[str, Sequence[int]]) -> MemoryUse:
    """Measure what a session takes, in a process of its own; `shapes` are those of inputs with open sizes.

    Raises:
        RuntimeUnavailableError: the process failed, or the system does not report a process's memory.
    """
    with Engines() as engines:
        return measure_memory(open_request(str(engines.file(model, settings.engine)), settings), shapes)


def measure_models(
    models: Sequence[BenchModel],
    settings: BenchSettings | None = None,
    *,
    feeds: Callable[[Any], Sequence[Feed]] | None = None,
    shapes: Shapes | None = None,
    notes: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Measurement:
    """Measure models side by side: warm-up, interleaved scenarios, ratios against the baseline, notes.

    Args:
        feeds: gives the samples, called with the first session opened; None makes them up from its signature.
        shapes: of inputs with open sizes, for made-up samples.
        notes: what is worth reporting of how the models were chosen.

    Raises:
        UsageError: settings, cores or shapes that make no sense.
        DataError: samples that a model refuses, or models that take different inputs.
        RuntimeUnavailableError: onnxruntime is missing or refuses a model.
    """
    onnxruntime()
    settings = settings or BenchSettings()
    with device_errors(), _drawn(progress, settings) as on_progress:
        report = bench_models(models, settings, feeds=feeds, shapes=shapes, notes=notes, on_progress=on_progress)
    return measurement(report)


def measurement(report: Mapping[str, Any]) -> Measurement:
    """Return the report of `bench_models` as a value."""
    named = ("machine", "versions", "settings", "models", "scenarios")
    return Measurement(**{name: report[name] for name in named}, notes=tuple(report["notes"]), report=report)


def sessions_to_time(model: Path, folder: Path | None = None) -> int:
    """Return in how many sessions to time a model, whose external data lie in `folder` (None: next to it): two of one
    small model differ by up to a fifth, by where their memory happens to lie."""
    return FEWEST_SESSIONS if model_bytes(model, folder) <= _SMALL_BYTES else 1


@contextmanager
def _drawn(progress: Progress, settings: BenchSettings) -> Iterator[OnProgress]:
    """The scenarios as one stage of a hundred steps each, drawn on `progress`."""
    steps = 100
    done = 0
    with progress.stage("measuring", steps * len(settings.scenarios)) as advance:

        def on_progress(scenario: str, share: float) -> None:
            nonlocal done
            # A search for the server rate starts over and over; the bar only ever moves forward.
            now = int(steps * (settings.scenarios.index(scenario) + min(1.0, share)))
            advance(max(0, now - done))  # none, too: it is a sign of life
            done = max(now, done)

        yield on_progress


"""Output name → array, for one sample."""
