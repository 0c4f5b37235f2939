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
from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.nonlinear import find_range_before
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
        kind = f"{scheme.activation_type}-{'symmetric' if scheme.activation_symmetric else 'asymmetric'}-{scheme.scale}"
        path = workdir.parent / f"ranges-{kind}-{state.prepared.digest}.json"
        # Write the choice once: a search builds dozens of candidates from one float model.
        if not path.exists():
            grid = grid_of(scheme.activation_type, scheme.activation_symmetric, scheme.scale)
            choices = _choose_ranges(state, grid, progress)
            path.write_text(json.dumps({name: [r.low, r.high] for name, r in choices.items()}), "utf-8")
        ends = parse(json_object(path, OutputError, "Remove it"), dict[str, tuple[float, float]], path, OutputError)
        ranges = {name: Range(*pair) for name, pair in ends.items()}
        if not ranges:
            return state.note(f"{self.name}: no activation function follows a quantized tensor")
        return state.replace(ranges={**state.ranges, **ranges}).note(
            f"{self.name}: {len(ranges)} ranges chosen for the least error after the function that follows"
        )


def _choose_ranges(state: RecoveryState, grid: Grid, progress: Progress) -> dict[str, Range]:
    assert state.statistics is not None
    followers = Followers(state.prepared.model)
    ranges: dict[str, Range] = {}
    with progress.stage("ranges before activation functions", len(state.ranges)) as advance:
        for name in state.ranges:
            advance(1)
            follower = followers.find(name)
            # If anything else reads the tensor directly, its error before the function matters too.
            if follower.nodes and name not in follower.ends and name in state.statistics.tensors:
                best = find_range_before(state.statistics.tensors[name], followers.function(follower), grid)
                if best is not None:
                    ranges[name] = best
    return ranges


RECOVERY = NonlinearRanges()
