"""Set how models are measured. `edgeq bench` and the runner take the same options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from edgeq_device.errors import UsageError
from edgeq_device.measure import scenarios
from edgeq_device.measure.cores import parse_cores
from edgeq_device.measure.latency import WarmUp

OFFICIAL_DURATION_S = 600.0
BOUND_FACTOR = 10.0
"""Default latency bound of the server scenario, as a multiple of the baseline's median latency."""
ALL = "all"
"""Name that selects all scenarios on a command line."""
_TAKEN_BY = {
    "batch": ("--batch", (scenarios.OFFLINE.name, scenarios.MULTI_STREAM.name)),
    "target_qps": ("--qps", (scenarios.SERVER.name,)),
    "latency_bound_ms": ("--latency-bound", (scenarios.SERVER.name,)),
}
"""Fields of `BenchSettings` that apply only to some scenarios, each with its option and the names of the scenarios."""


@dataclass(frozen=True)
class BenchSettings:
    """Set how models are measured.

    Attributes:
        scenarios: names from `SCENARIOS`.
        min_duration_s, min_queries: minimum number of seconds and of queries for each model in each scenario; both must
            be reached. MLPerf's official duration is 600 s (`OFFICIAL_DURATION_S`), but two seconds are enough for a
            ratio on a workstation.
        seed: seed for the order of the samples, the order of the models in a round, and the arrival times.
        batch: number of samples stacked along axis 0 into one run, in the offline and multi-stream scenarios.
        target_qps: arrival rate of the server scenario; None searches for the highest rate that keeps the latency
            bound.
        latency_bound_ms: bound on p99 in the server scenario; None uses `BOUND_FACTOR` times the baseline's p50.
        baseline: model that the others are compared with; "" selects "float32" if present, else the first model.
        threads, pin: number of intra-op threads (0: onnxruntime's choice) and cores with which the caller opened the
            sessions; `run_bench` only records them.
    """

    scenarios: Tuple[str, ...] = ("single-stream",)
    min_duration_s: float = 2.0
    min_queries: int = 100
    seed: int = 0
    batch: int = 1
    target_qps: Optional[float] = None
    latency_bound_ms: Optional[float] = None
    baseline: str = ""
    threads: int = 0
    pin: Tuple[int, ...] = ()
    warm_up: WarmUp = field(default_factory=WarmUp)

    def check(self) -> None:
        """Check that the values make sense.

        Raises:
            UsageError: a value makes no sense; the message names the setting.
        """
        unknown = [s for s in self.scenarios if s not in scenarios.SCENARIOS]
        if unknown or not self.scenarios:
            name = unknown[0] if unknown else ""
            raise UsageError(f"there is no scenario {name!r}", f"Choose from {', '.join(scenarios.SCENARIOS)}")
        # These bounds catch typing errors; a day is longer than any benchmark.
        if not 0 <= self.min_duration_s <= 86_400:
            raise UsageError(f"a duration of {self.min_duration_s} s makes no sense", "Give 0 to 86400 seconds")
        for name, number, limit in (("queries", self.min_queries, 10**8), ("batch", self.batch, 65_536)):
            if not 1 <= number <= limit:
                raise UsageError(f"{name} cannot be {number}", f"Give 1 to {limit}")
        if self.threads < 0:
            raise UsageError(f"threads cannot be {self.threads}", "Give 0 (onnxruntime's choice) or more")
        for name, value in (("rate", self.target_qps), ("latency bound", self.latency_bound_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the {name} cannot be {value}", "Give a positive number")

    def to_dict(self) -> Dict[str, Any]:
        """Return the settings as plain JSON values. Durations are in seconds, the latency bound is in milliseconds, and
        the rate is in queries a second.
        """
        fields = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {key: value for key, value in fields.items() if key not in ("baseline", "warm_up")}


def parse_settings(
    *,
    scenario: str = "single-stream",
    duration: Optional[float] = None,
    official: bool = False,
    pin: Optional[str] = None,
    **fields: Any,
) -> BenchSettings:
    """Return checked settings from the options of a command line.

    Args:
        scenario: name of a scenario, or "all".
        duration, official: minimum seconds, or True for MLPerf's 600; only one of the two may be given.
        pin: cores, as text such as "0,2-3".
        fields: other fields of `BenchSettings`.

    Raises:
        UsageError: a value makes no sense, or an option has no effect in the scenario.
    """
    if official and duration is not None:
        raise UsageError("--official and --duration both set the duration", "Leave one out")
    if duration is None:
        duration = OFFICIAL_DURATION_S if official else BenchSettings.min_duration_s
    settings = BenchSettings(
        scenarios=tuple(scenarios.SCENARIOS) if scenario == ALL else (scenario,),
        min_duration_s=duration,
        pin=parse_cores(pin) if pin is not None else (),
        **fields,
    )
    settings.check()
    for name, (option, takers) in _TAKEN_BY.items():
        # A value that equals the default counts as not given.
        is_set = getattr(settings, name) != getattr(BenchSettings, name)
        if is_set and not set(takers) & set(settings.scenarios):
            problem = f"{option} has no effect in the {scenario} scenario"
            raise UsageError(problem, f"Leave it out, or choose --scenario {' or '.join(takers)}")
    return settings
