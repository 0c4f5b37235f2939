"""The statistics of shards merge into those of all samples, and an interrupt leaves no shard half merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from edgeq.calibration.collect import ShardMerger, _collect
from edgeq.calibration.observer import Observer
from edgeq.calibration.plan import DerivedTensor, StatisticsPlan
from edgeq.calibration.statistics import EMPTY, Counter, TensorStatistics

PLAN = StatisticsPlan(
    ("x",), ("y",), (DerivedTensor("c", "clip", ("x",), 0.0, 1.0), DerivedTensor("u", "union", ("c", "y")))
)
ARRAYS = [np.random.default_rng(i).normal(scale=i, size=(2, 5000)).astype(np.float32) for i in range(1, 6)]


def statistics(arrays: list[np.ndarray], *, whole: bool = True) -> dict[str, TensorStatistics]:
    """Compute the statistics of samples with an x and a y from the arrays themselves. If not `whole`, return them as
    shards do.
    """
    found = {}
    for name in PLAN.names:
        observer = Observer(TensorStatistics())
        for x, y in arrays:
            clipped = np.clip(x, 0, 1)
            observer.observe({"x": x, "y": y, "c": clipped, "u": np.concatenate([clipped, y])}[name])
        found[name] = observer.freeze()
    for how in PLAN.derived if not whole else ():
        found[how.name] = replace(found[how.name], histogram=EMPTY)
    return found


@pytest.mark.parametrize("seen", [0, 2])
def test_shards_merge_to_what_all_samples_give(seen: int) -> None:
    state = statistics(ARRAYS[:seen]) if seen else {name: TensorStatistics() for name in PLAN.names}
    merged = ShardMerger(PLAN, state)
    for array in ARRAYS[seen:]:
        merged.add(statistics([array], whole=False))
    assert merged.so_far() == statistics(ARRAYS)


def collected(
    parts: Iterator[dict[str, TensorStatistics]],
    state: dict[str, TensorStatistics],
    saved: list[dict[str, TensorStatistics]],
) -> None:
    """Collect `parts` into `state`. Append to `saved` what is saved."""
    merged = ShardMerger(PLAN, state)
    _collect(merged.run(parts), merged, state, lambda n: None, lambda: saved.append({**state}), 1e9)


def test_an_interrupt_leaves_no_shard_half_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: TensorStatistics() for name in PLAN.names}
    before, saved, taken = dict(state), [], []
    take = Counter.take

    def interrupted(counter: Counter, other: object) -> None:
        taken.append(other)
        if len(taken) == 4:  # the last tensor of the second shard
            raise KeyboardInterrupt
        take(counter, other)  # type: ignore[arg-type]

    def parts() -> Iterator[dict[str, TensorStatistics]]:
        for array in ARRAYS:
            yield statistics([array], whole=False)

    monkeypatch.setattr(Counter, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collected(parts(), state, saved)
    assert saved == [before]


def test_an_interrupt_between_shards_loses_none() -> None:
    state, saved = {name: TensorStatistics() for name in PLAN.names}, []

    def parts() -> Iterator[dict[str, TensorStatistics]]:
        yield from (statistics([array], whole=False) for array in ARRAYS[:3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collected(parts(), state, saved)
    assert saved == [statistics(ARRAYS[:3])]
