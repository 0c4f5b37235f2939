"""Choose the range of a tensor for the least error after the activation function that follows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import OutputError
from edgeq.model.quant_params import Grid, grid_of
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.nonlinear import Followers, range_behind
from edgeq.util.display import Progress
from edgeq.util.record_files import json_object
from edgeq.util.records import parse


@dataclass(frozen=True)
class NonlinearRanges(Recovery):
    """Choose the ranges of tensors before an activation function for the least error after the function."""

    name: str = "nonlinear-ranges"
    title: str = "ranges before activation functions that waste no steps where the function is flat"
    stage: Stage = "ranges"
    free: bool = True
    order = 60

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """See `Recovery.apply`. The ranges depend only on the float model and the integer type, so they are kept for
        later builds.
        """
        del samples
        scheme = state.scheme
        kind = f"{scheme.activation_type}-{'symmetric' if scheme.activation_symmetric else 'asymmetric'}"
        kept = workdir.parent / f"ranges-{kind}-{state.prepared.digest}.json"
        if not kept.exists():
            found = _chosen(state, grid_of(scheme.activation_type, scheme.activation_symmetric), progress)
            kept.write_text(json.dumps({name: [r.low, r.high] for name, r in found.items()}), "utf-8")
        ends = parse(json_object(kept, OutputError, "Remove it"), dict[str, tuple[float, float]], kept, OutputError)
        chosen = {name: Range(*pair) for name, pair in ends.items()}
        if not chosen:
            return state.note(f"{self.name}: no activation function follows a quantized tensor")
        return state.replace(ranges={**state.ranges, **chosen}).note(
            f"{self.name}: {len(chosen)} ranges chosen for the least error after the function that follows"
        )


def _chosen(state: RecoveryState, grid: Grid, progress: Progress) -> dict[str, Range]:
    assert state.statistics is not None
    followers = Followers(state.prepared.model)
    chosen: dict[str, Range] = {}
    with progress.stage("ranges before activation functions", len(state.ranges)) as advance:
        for name in state.ranges:
            advance(1)
            follower = followers.of(name)
            if follower.nodes and name not in follower.ends and name in state.statistics.tensors:
                found = range_behind(state.statistics.tensors[name], followers.function(follower), grid)
                if found is not None:
                    chosen[name] = found
    return chosen


RECOVERY = NonlinearRanges()
