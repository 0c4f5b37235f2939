"""Layers that integers make slower: kept in float, where that makes the whole faster.

An integer kernel is not always the quicker one: a convolution of three channels, or a depthwise one, can take twice as
long as in float. Which these are on this machine is read off the runtime's profile of both models. A layer in float
costs conversions at its borders, which the profile does not foretell, so ever longer beginnings of the list, worst
first, are built and raced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgeq.tune.candidate import Candidate
from edgeq.tune.explain import share
from edgeq.tune.record import Stage, Trial
from edgeq.tune.space import in_float
from edgeq.tune.trials import TrialTable

_LEAST_GAIN = 0.002
"""Share of float32's time that a layer must lose in integers to be looked at: less is noise of the profiler."""


def slower_in_integers(names: Sequence[str], float_us: dict[str, float], int8_us: dict[str, float]) -> tuple[str, ...]:
    """Those of `names` that take longer in integers, by what they lose, most first.

    Args:
        float_us, int8_us: microseconds by layer in each model; layers that are not in both are left out.
    """
    least = _LEAST_GAIN * sum(float_us.values())
    lost = {n: int8_us[n] - float_us[n] for n in names if n in float_us and n in int8_us}
    return tuple(sorted((n for n, us in lost.items() if us > least), key=lambda n: (-lost[n], n)))


def beginnings(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The first one, two, four ... names, and all."""
    sizes = [2**k for k in range(len(names).bit_length()) if 2**k < len(names)]
    return [tuple(names[:size]) for size in (*sizes, len(names)) if size]


def keep_slow_layers_in_float(
    table: TrialTable,
    base: Trial,
    slow: Sequence[str],
    screen: Callable[[Candidate, Stage, str], bool],
    race: Callable[[Sequence[Trial]], None],
) -> None:
    """Try `base` with its slow layers in float, and of all that keep only the fastest.

    Args:
        race: times trials beside float32.
    """
    made = []
    for nodes in beginnings(slow):
        candidate = in_float(base.candidate, nodes)
        if screen(candidate, "exclusion", base.name):
            made.append(candidate.name)
    if not made:
        return
    race([table[name] for name in (base.name, *made)])
    family = [table[name] for name in (base.name, *made)]
    fastest = min(family, key=lambda t: t.timing.latency["p50_ms"] if t.timing else float("inf"))
    for trial in family:
        if trial.name == fastest.name:
            continue
        table.eliminate(trial.name, f"{share(trial, fastest):.2f} times the latency of {fastest.name}")
