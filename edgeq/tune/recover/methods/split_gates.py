"""Convolutions before a gate, x = y g(y) as in SiLU and GELU, computed twice: once for each of the two readers of y.

In integers, y has one scale for both. The gate g needs small steps near zero; the product needs the whole range of y,
and x then has one scale for channels that may differ a hundredfold. No range serves both. But two convolutions cost
little in integers, and then each has its own scale:

    y  = W u + b          →  g(y)         its range is where g changes
    y' = (W u + b) / k    →  x' = y' g(y)     per channel k, so that all channels fill the range;
                                              the layers that read x' have their weights multiplied by k

In floats the network computes the same. Which gates are split is decided by simulation on samples of y: the error of x
with and without the split, weighted by the layers that read x, against the sum over all gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeq.calibrate.range_method import grid_of
from edgeq.data.samples import Samples
from edgeq.model.prepare import rewritten
from edgeq.tune.recover.base import Recovery, Stage, State
from edgeq.tune.recover.gates import VALUE, find_gates, plan_gates, split_all, worth_it
from edgeq.util.display import Progress


@dataclass(frozen=True)
class SplitGates(Recovery):
    """The recovery: gates are split while one causes at least `share` of the error of all gates.

    Every split costs a convolution.
    """

    name: str = "split-gates"
    title: str = "layers before x * g(x) computed twice, each with a range of its own and scaled channels"
    stage: Stage = "model"
    free: bool = False
    order = 30
    share: float = 0.1
    replaces: str = ""

    def apply(self, state: State, samples: Samples, workdir: Path, progress: Progress) -> State:
        """Raises:
        EdgeqError: the model refuses a sample.
        """
        gates = [gate for gate in find_gates(state.prepared.model) if gate.layer.name not in state.scheme.exclude]
        if not gates:
            return state.note(f"{self.name}: no layer is followed by a product with a function of itself")
        assert state.statistics is not None
        grid = grid_of(state.scheme.activation_type, state.scheme.activation_symmetric)
        plans = plan_gates(state.prepared, gates, samples, state.statistics, grid, progress)
        chosen = worth_it(plans, self.share)
        if not chosen:
            return state.note(f"{self.name}: none of {len(gates)} gates stands out")
        model = state.prepared.model.clone()
        split_all(model, [(plan.gate, plan.factor) for plan in chosen])
        prepared = rewritten(state.prepared, model, workdir / "split.onnx")
        ranges = {plan.gate.layer.output + VALUE: plan.value for plan in chosen}
        names = ", ".join(plan.gate.layer.name for plan in chosen)
        changed = {plan.gate.layer.name for plan in chosen}
        return state.replace(
            prepared=prepared, ranges={**state.ranges, **ranges}, changed=state.changed | changed
        ).note(f"{self.name}: {len(chosen)} of {len(gates)} gates split: {names}")


RECOVERY = SplitGates()
