"""What a command line says about a benchmark, as settings: the same for `edgeq bench` and `edgeq_run.py bench`."""

from __future__ import annotations

from typing import Any, Optional

from edgeq_device.bench import OFFICIAL_DURATION_S, BenchSettings
from edgeq_device.environment import parse_cores
from edgeq_device.errors import UsageError
from edgeq_device.scenarios import SCENARIOS

ALL = "all"
SCENARIO_CHOICES = (*SCENARIOS, ALL)


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
        UsageError: what makes no sense.
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
    return settings
