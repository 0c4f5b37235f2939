"""Measure the latency and throughput of models on this machine: run the benchmark of `edgeq_device` on edgeq's
sessions.

The benchmark itself is in `edgeq_device`, which is included in bundles, so a workstation and a device run the same
code. This module uses it through `measure_models`, which returns the report as a `Measurement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgeq_device.bundle.bench_models import BenchModel, Shapes, bench_models
from edgeq_device.measure.bench import OnProgress
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.bench_text import format_bench
from edgeq_device.measure.claim import Claim
from edgeq_device.measure.scenarios import Feed

from edgeq.run.session import onnxruntime
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Page, Progress


@dataclass(frozen=True)
class Measurement(Page):
    """Hold a latency measurement and its conditions. docs/bench.md lists the keys.

    Attributes:
        machine: CPU, architecture, system, cores, governors.
        versions: versions of Python, onnxruntime and numpy.
        settings: durations, counts, scenarios, threads, cores, seed.
        models: execution providers and memory, by model name.
        scenarios: by scenario name, the figures of each model and the ratios to the baseline.
        notes: possible disturbances of the figures, and what the figures leave out.
        report: the whole measurement as plain values.
    """

    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    models: Mapping[str, Any]
    scenarios: Mapping[str, Any]
    notes: tuple[str, ...]
    report: Mapping[str, Any]

    def latency(self, name: str, scenario: str = "single-stream") -> Mapping[str, float]:
        """Return the latency figures of one model.

        The keys are count, min_ms, p50_ms, p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv and samples_per_s.
        """
        figures: Mapping[str, float] = self.scenarios[scenario]["models"][name]["latency"]
        return figures

    def ratio(self, name: str, scenario: str = "single-stream") -> Mapping[str, Any]:
        """Return how many times faster `name` is than the baseline (`edgeq_device.measure.claim`).

        The keys are estimate, low, high, confidence, pairs, baseline_ms, ms, reason and verdict.
        """
        ratio: Mapping[str, Any] = self.scenarios[scenario]["ratios"][name]
        return ratio

    def __brief__(self) -> dict[str, Any]:
        p50 = {
            f"{model}, {name}, p50 ms": figures["latency"]["p50_ms"]
            for name, scenario in self.scenarios.items()
            for model, figures in scenario["models"].items()
        }
        return {**p50, "notes": self.notes}

    def __page__(self) -> dict[str, Any]:
        return {"name": ", ".join(self.models), "bench": self.report}

    def __record__(self) -> Mapping[str, Any]:
        return self.report

    def text(self, *, verbose: bool = False) -> str:
        """Return the measurement as a readable table."""
        return "\n".join(format_bench(self.report, verbose=verbose))


def read_speed(timing: Measurement, name: str) -> Claim:
    """Return the claim that compares the speed of `name` with the baseline in the single-stream scenario."""
    return Claim.from_record(timing.ratio(name))


def measure_models(
    models: Sequence[BenchModel],
    settings: BenchSettings | None = None,
    *,
    feeds: Callable[[Any], Sequence[Feed]] | None = None,
    shapes: Shapes | None = None,
    notes: Sequence[str] = (),
    progress: Progress = SILENT,
) -> Measurement:
    """Measure models side by side: warm-up, interleaved scenarios, ratios to the baseline, notes.

    Args:
        feeds: function from the first opened session to the samples. With None, samples are made up from the signature
            of that session.
        shapes: sizes of inputs with open sizes, for made-up samples.
        notes: facts about how the models were chosen, for the report.

    Raises:
        UsageError: the settings, cores or shapes are invalid.
        DataError: a model refuses the samples, or the models have different inputs.
        RuntimeUnavailableError: onnxruntime is missing or refuses a model.
    """
    # If onnxruntime is missing, this fails with advice, before anything is measured.
    onnxruntime()
    settings = settings or BenchSettings()
    with device_errors(), _show_progress(progress, settings) as on_progress:
        report = bench_models(models, settings, feeds=feeds, shapes=shapes, notes=notes, on_progress=on_progress)
    return read_measurement(report)


def read_measurement(report: Mapping[str, Any]) -> Measurement:
    """Return the report of `bench_models` as a `Measurement`."""
    named = ("machine", "versions", "settings", "models", "scenarios")
    return Measurement(**{name: report[name] for name in named}, notes=tuple(report["notes"]), report=report)


@contextmanager
def _show_progress(progress: Progress, settings: BenchSettings) -> Iterator[OnProgress]:
    """Show the progress of all scenarios on `progress` as one stage, with a hundred steps for each scenario."""
    steps = 100
    shown_steps = 0
    with progress.stage("measuring", steps * len(settings.scenarios)) as advance:

        def on_progress(scenario: str, share: float) -> None:
            nonlocal shown_steps
            # The search for the server rate restarts several times, but the bar only moves forward.
            now = int(steps * (settings.scenarios.index(scenario) + min(1.0, share)))
            advance(max(0, now - shown_steps))  # Even a step of 0 shows that the benchmark is still running.
            shown_steps = max(now, shown_steps)

        yield on_progress
