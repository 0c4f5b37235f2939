"""Latency and throughput of models on this machine: edgeq_device's benchmark, fed with edgeq's sessions.

The measuring itself lives in `edgeq_device`, which travels in bundles, so that a workstation and a device run the same
code. Its face here is `bench_models`, and `Measurement`, the report as a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import edgeq_device.errors as device_errors
from edgeq_device import feeds as made_up
from edgeq_device.bench import OFFICIAL_DURATION_S, BenchSettings, OnProgress
from edgeq_device.bench_text import format_bench
from edgeq_device.environment import parse_cores
from edgeq_device.memory import MemoryUse, measure_memory
from edgeq_device.scenarios import SCENARIOS, Feed
from edgeq_device.subjects import Shapes, Subject, bench_subjects

import edgeq.errors
from edgeq.errors import EdgeqError, UsageError
from edgeq.progress import SILENT, Progress
from edgeq.session import SessionSettings, onnxruntime, open_session

__all__ = [
    "BenchSettings",
    "Measurement",
    "Subject",
    "bench",
    "bench_models",
    "device_errors_as_ours",
    "parse_settings",
    "parse_shapes",
    "settings_with",
    "subject",
]


@dataclass(frozen=True)
class Measurement:
    """A latency measurement with everything that it was taken on and with; keys as docs/bench.md lists them.

    Attributes:
        report: `edgeq_device.bench.run_bench`'s report, plain values.
    """

    report: Mapping[str, Any]

    @property
    def machine(self) -> Mapping[str, Any]:
        return dict(self.report["machine"])

    @property
    def versions(self) -> Mapping[str, str]:
        return dict(self.report["versions"])

    @property
    def settings(self) -> Mapping[str, Any]:
        return dict(self.report["settings"])

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.report["notes"])

    def latency(self, name: str, scenario: str = "single-stream") -> Mapping[str, float]:
        """The figures of one model: count, min_ms, p50_ms, p90_ms, p99_ms, p999_ms, max_ms, mean_ms, cv,
        samples_per_s."""
        return dict(self.report["scenarios"][scenario]["models"][name]["latency"])

    def ratio(self, name: str, scenario: str = "single-stream") -> Mapping[str, float]:
        """How many times faster `name` is than the baseline: estimate, low, high, confidence, pairs."""
        return dict(self.report["scenarios"][scenario]["ratios"][name])

    def to_dict(self) -> dict[str, Any]:
        return dict(self.report)

    def text(self, *, verbose: bool = False) -> str:
        """The table for people."""
        return format_bench(self.report, verbose=verbose)


def subject(name: str, model: Path, settings: SessionSettings | None = None) -> Subject:
    """A model file to measure, opened with `settings` (whose thread count the benchmark's replaces)."""
    base = settings or SessionSettings()

    def open_it(threads: int) -> Any:
        return open_session(model, replace(base, intra_op_threads=threads))

    def memory(threads: int, shapes: Shapes) -> MemoryUse:
        return measure_memory(
            model,
            shapes=shapes,
            providers=base.providers,
            config=base.config,
            optimization=base.optimization,
            threads=threads,
        )

    return Subject(name, open_it, memory)


def bench_models(
    models: Mapping[str, Path],
    settings: BenchSettings | None = None,
    *,
    feeds: Sequence[Feed] | None = None,
    shapes: Shapes | None = None,
    session: SessionSettings | None = None,
    progress: Progress = SILENT,
) -> Measurement:
    """Measure model files side by side; see `bench`."""
    subjects = [subject(name, path, session) for name, path in models.items()]
    given = None if feeds is None else (lambda _: feeds)
    return bench(subjects, settings, feeds=given, shapes=shapes, progress=progress)


def bench(
    subjects: Sequence[Subject],
    settings: BenchSettings | None = None,
    *,
    feeds: Callable[[Any], Sequence[Feed]] | None = None,
    shapes: Shapes | None = None,
    progress: Progress = SILENT,
) -> Measurement:
    """Measure subjects side by side: warm-up, interleaved scenarios, ratios against the baseline, notes.

    Args:
        feeds: gives the samples, called with the first session opened; None makes them up from its signature.
        shapes: of inputs with open sizes, for made-up samples.

    Raises:
        UsageError: settings, cores or shapes that make no sense.
        DataError: samples that a model refuses, or models that take different inputs.
        RuntimeUnavailableError: onnxruntime is missing or refuses a model.
    """
    onnxruntime()
    settings = settings or BenchSettings()
    with device_errors_as_ours(), _drawn(progress, settings) as on_progress:
        return Measurement(bench_subjects(subjects, settings, feeds=feeds, shapes=shapes, on_progress=on_progress))


def settings_with(settings: BenchSettings | None, *, baseline: str) -> BenchSettings:
    """The settings, or the default ones, with another baseline."""
    return replace(settings or BenchSettings(), baseline=baseline)


def parse_settings(
    *, scenario: str, duration: float | None = None, official: bool = False, pin: str | None = None, **others: Any
) -> BenchSettings:
    """Settings from what a command line says; checked.

    Args:
        scenario: a name, or "all".
        duration, official: seconds, or MLPerf's 600; not both.
        pin: cores as "0,2-3".
        others: further fields of `BenchSettings`.

    Raises:
        UsageError: what makes no sense.
    """
    if official and duration is not None:
        raise UsageError("--official and --duration both say how long to measure", "Leave one out")
    with device_errors_as_ours():
        settings = BenchSettings(
            scenarios=tuple(SCENARIOS) if scenario == "all" else (scenario,),
            min_duration_s=OFFICIAL_DURATION_S if official else 2.0 if duration is None else duration,
            pin=parse_cores(pin) if pin is not None else (),
            **others,
        )
        settings.check()
        return settings


def parse_shapes(texts: Sequence[str]) -> Shapes:
    """Shapes by input name from "name=1,3,224,224" each.

    Raises:
        UsageError: anything else.
    """
    with device_errors_as_ours():
        return made_up.parse_shapes(texts)


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
            if now > done:
                advance(now - done)
                done = now

        yield on_progress


@contextmanager
def device_errors_as_ours() -> Iterator[None]:
    """Turn edgeq_device's errors into edgeq's of the same name."""
    try:
        yield
    except device_errors.DeviceError as error:
        ours = getattr(edgeq.errors, type(error).__name__, EdgeqError)
        raise ours(error.problem, error.fix) from error
