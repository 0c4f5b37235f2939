"""How a benchmark is to be done: settings as a value, and from command-line options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from edgeq_device.environment import parse_cores
from edgeq_device.errors import UsageError
from edgeq_device.latency import WarmUp
from edgeq_device.scenarios import MULTI_STREAM, OFFLINE, SCENARIOS, SERVER

OFFICIAL_DURATION_S = 600.0
BOUND_FACTOR = 10.0
"""Where no latency bound is given, the server scenario's is this times the baseline's median latency."""
ALL = "all"
"""Stands for all scenarios on a command line."""
_TAKEN_BY = {
    "batch": ("--batch", (OFFLINE.name, MULTI_STREAM.name)),
    "target_qps": ("--qps", (SERVER.name,)),
    "latency_bound_ms": ("--latency-bound", (SERVER.name,)),
}
"""Fields of `BenchSettings` that not every scenario takes: the option, and the scenarios that do."""


@dataclass(frozen=True)
class BenchSettings:
    """How to measure.

    Attributes:
        scenarios: names from `SCENARIOS`.
        min_duration_s, min_queries: both are met by every model in every scenario. MLPerf's official duration is
            600 s (`OFFICIAL_DURATION_S`); two seconds settle a ratio on a workstation.
        seed: of the sample order, the order of models in a round, and the arrivals.
        batch: samples stacked along axis 0 into one run, in the offline and multi-stream scenarios.
        target_qps: arrival rate of the server scenario; None searches the highest that the bound allows.
        latency_bound_ms: on the server scenario's p99; None takes `BOUND_FACTOR` times the baseline's p50.
        baseline: the model that the others are compared with; "" takes "float32", else the first.
        threads, pin: what the sessions were opened with, for the record: intra-op threads (0: onnxruntime's choice)
            and cores.
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
        """Refuse what makes no sense.

        Raises:
            UsageError: naming the setting.
        """
        unknown = [s for s in self.scenarios if s not in SCENARIOS]
        if unknown or not self.scenarios:
            name = unknown[0] if unknown else ""
            raise UsageError(f"there is no scenario {name!r}", f"Choose from {', '.join(SCENARIOS)}")
        if not 0 <= self.min_duration_s <= 86_400:
            raise UsageError(f"a duration of {self.min_duration_s} s makes no sense", "Give 0 to 86400 seconds")
        for name, number, most in (("queries", self.min_queries, 10**8), ("batch", self.batch, 65_536)):
            if not 1 <= number <= most:
                raise UsageError(f"{name} cannot be {number}", f"Give 1 to {most}")
        if self.threads < 0:
            raise UsageError(f"threads cannot be {self.threads}", "Give 0 (onnxruntime's choice) or more")
        for name, value in (("rate", self.target_qps), ("latency bound", self.latency_bound_ms)):
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"the {name} cannot be {value}", "Give a positive number")

    def to_dict(self) -> Dict[str, Any]:
        """Plain JSON values: durations in seconds, the latency bound in milliseconds, the rate in queries a second."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {key: value for key, value in plain.items() if key not in ("baseline", "warm_up")}


def parse_settings(
    *,
    scenario: str = "single-stream",
    duration: Optional[float] = None,
    official: bool = False,
    pin: Optional[str] = None,
    **others: Any,
) -> BenchSettings:
    """Settings from options; checked.

    Args:
        scenario: a name, or "all".
        duration, official: seconds, or MLPerf's 600; not both.
        pin: cores as "0,2-3".
        others: further fields of `BenchSettings`.

    Raises:
        UsageError: what makes no sense, or an option that says nothing in the scenario.
    """
    if official and duration is not None:
        raise UsageError("--official and --duration both say how long to measure", "Leave one out")
    if duration is None:
        duration = OFFICIAL_DURATION_S if official else BenchSettings.min_duration_s
    settings = BenchSettings(
        scenarios=tuple(SCENARIOS) if scenario == ALL else (scenario,),
        min_duration_s=duration,
        pin=parse_cores(pin) if pin is not None else (),
        **others,
    )
    settings.check()
    for name, (option, takers) in _TAKEN_BY.items():
        given = getattr(settings, name) != getattr(BenchSettings, name)
        if given and not set(takers) & set(settings.scenarios):
            problem = f"{option} says nothing in the {scenario} scenario"
            raise UsageError(problem, f"Leave it out, or choose --scenario {' or '.join(takers)}")
    return settings
