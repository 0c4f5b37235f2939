"""Accuracy recovery, where something cheap loses too much: methods that cost no speed first, layers in float last.

What to give more bits, by noise removed for each byte that it costs.

The noise of a tensor or product is what the outputs show where nothing but it is rounded, in the float model on this
machine's kernels: a simulator of the hardware would take a thousand times as long and say the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import onnx_ir as ir
from edgeq_device.claim import SLOWER, UNKNOWN

from edgeq.calibrate.ranges import Range
from edgeq.hardware.profile import Profile
from edgeq.model.edit import Editor, insert_behind, set_constant
from edgeq.model.graph import is_op, name_of, only_reader, sizes
from edgeq.model.quant_params import QuantParams
from edgeq.model.sessions import open_in_memory
from edgeq.quantize.block_weights import block_products, read_blocks
from edgeq.scheme import ALL_NODES
from edgeq.tune.decision import in_simulation
from edgeq.tune.evaluator import Evaluator
from edgeq.tune.explain import Trial
from edgeq.tune.float_layers import MacCosts, RankedLayer, Ranking, select_float_layers
from edgeq.tune.goal import Deadline
from edgeq.tune.halving import build_and_assess
from edgeq.tune.recover.layers import find_layers
from edgeq.tune.space import Candidate
from edgeq.tune.timing import MOST_S, RACED, race_until_claimed, time_new
from edgeq.tune.trials import BY_TIME, FLOAT_MACS, ROUGHLY, WIDE_COST, TrialTable, loss_of, structure_of
from edgeq.util.display import Progress

WIDE: Literal["wide"] = "wide"
"""The field of a scheme that names the nodes whose results are raised from 8 to 16 bits."""
_ACTIVATION = ir.DataType.UINT8
_CLIPPING = ("Relu", "Clip")


def rank_products(
    model: ir.Model, quantized: ir.Model, noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Products of a 4-bit model in the order in which to give them 8 bits.

    Args:
        model: the prepared float model.
        quantized: the same with its products in blocks of 4 bits.
        noise_of: noise power over signal power at the outputs of an open session.
        expired: whether to stop measuring; what was not measured comes last.
    """
    products = block_products(quantized)
    found: list[RankedLayer] = []
    costs: dict[str, int] = {}
    for layer in find_layers(model):
        if layer.name not in products:
            continue
        blocks = read_blocks(products[layer.name])
        if blocks.bits == 8:
            continue
        changed = model.clone()
        weight = changed.graph.initializers[layer.weight]
        set_constant(weight, layer.unrows(blocks.matrix().T))
        noise = 0.0 if expired() else noise_of(open_in_memory(changed))
        found.append(RankedLayer(layer.name, (layer.name,), noise))
        costs[layer.name] = blocks.integers.size // 2
    return _ranked(found, costs, "eight_bit")


def rank_tensors(
    model: ir.Model, ranges: Mapping[str, Range], noise_of: Callable[[Any], float], expired: Callable[[], bool]
) -> Ranking:
    """Nodes in the order in which to raise what they make to 16 bits, for hardware that computes on either.

    Args:
        model: the prepared float model.
        ranges: of its tensors, as they are quantized.
        noise_of, expired: as `rank_products` has them.
    """
    found: list[RankedLayer] = []
    costs: dict[str, int] = {}
    for node in model.graph:
        name, made = str(node.name), name_of(node.outputs[0])
        unknown = made not in ranges or node.outputs[0].dtype not in (None, ir.DataType.FLOAT)
        if unknown or _is_clipped(node.outputs[0]):
            continue
        costs[name] = prod(sizes(node.outputs[0]) or (1,))
        noise = 0.0 if expired() else noise_of(open_in_memory(_rounded(model, made, ranges[made])))
        before = node.inputs[0] if is_op(node, *_CLIPPING) and node.inputs else None
        maker = before.producer() if before is not None and _is_clipped(before) else None
        found.append(RankedLayer(name, (name,) if maker is None else (str(maker.name), name), noise))
    return _ranked(found, costs, WIDE)


def _ranked(found: list[RankedLayer], costs: Mapping[str, int], field: Literal["wide", "eight_bit"]) -> Ranking:
    """By noise for each byte, the most first; `costs` in bytes by name."""
    order = sorted(found, key=lambda layer: (-layer.noise / max(1, costs[layer.name]), layer.name))
    return Ranking(tuple(order), MacCosts(costs), field=field)


def _is_clipped(value: ir.Value) -> bool:
    """Whether its only reader clips it: the range of what that makes takes its place, and it is never rounded."""
    reader = only_reader(value)
    return reader is not None and is_op(reader, *_CLIPPING)


def _rounded(model: ir.Model, tensor: str, span: Range) -> ir.Model:
    """`model` with one tensor rounded to 8 bits."""
    changed = model.clone()
    editor = Editor(changed)
    value = next(value for node in changed.graph for value in node.outputs if value.name == tensor)
    params = QuantParams.from_range(span.low, span.high, _ACTIVATION)
    quantized = editor.quantize(value, params, f"{tensor}/rounded")
    insert_behind(value, quantized, editor.dequantize(quantized, params, f"{tensor}/restored"), f"{tensor}/exact")
    changed.graph.sort()
    return changed


_BASES = 2
# Differences of speed that are not worth a recovery of what loses more.
_AHEAD = 1.1
# Times the loss allowed: what still loses so much with all layers in float that may be is given up.
_HOPELESS = 3.0
_SPARED = {"exclude": "layers in float", "wide": "tensors in 16 bits", "eight_bit": "products in 8 bits"}


def recover_accuracy(
    table: TrialTable,
    evaluator: Evaluator,
    deadline: Deadline,
    profile: Profile,
    float_threads: int,
    progress: Progress,
) -> None:
    """Try to make what is cheaper than the best that qualifies qualify too: by recoveries, then by layers in float.

    Where tensors may have 16 bits, all of them come first: an answer, if often more than is needed. Fewer are not tried
    where all of them surely lose too much.
    """
    recovered: list[Trial] = []
    for short in _bases(table, evaluator, deadline, float_threads):
        base = in_simulation(table, evaluator, short, deadline, progress)
        if deadline.passed():
            return
        time_new(table, evaluator, deadline, float_threads)
        if not _worthwhile(table, base) or any(_no_better(table, base, other) for other in recovered):
            continue
        known = {trial.name for trial in table.qualified()}
        _recover(table, evaluator, deadline, profile, base, progress)
        if any(trial.name not in known for trial in table.qualified()):
            recovered.append(base)


def _recover(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, profile: Profile, base: Trial, progress: Progress
) -> None:
    widens = WIDE in profile.search
    widest = _on_16_bits(table, evaluator, deadline, base, progress) if widens else None
    best = _apply_recoveries(table, evaluator, deadline, base, progress)
    if table.meets(best) or deadline.passed():
        return
    if widest is not None and not table.meets(widest):
        widest = _on_16_bits(table, evaluator, deadline, best, progress)
    if widest is None or _may_hold(table, widest):
        _keep_layers_in_float(table, evaluator, deadline, best, _headroom(table, base, widens), progress)


def _apply_recoveries(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, base: Trial, progress: Progress
) -> Trial:
    """The best of `base` with recoveries: group after group, each together, or where that does harm one by one; then
    without those that do harm now that the others are there, and without those that cost speed and are not needed."""
    groups = evaluator.recovery_groups()
    if base.candidate.scheme.mode != "static" or base.candidate.builder or not groups:
        return base
    best, max_drop = base, table.goal.max_drop
    tried = {frozenset(base.candidate.recoveries)}

    def attempt(candidate: Candidate) -> Trial:
        """Build and assess `candidate`, and remember its set of recoveries as tried."""
        tried.add(frozenset(candidate.recoveries))
        made = build_and_assess(table, evaluator, candidate, "recovery", best.name, progress)
        return in_simulation(table, evaluator, made, deadline, progress)

    for position, group in enumerate(groups):
        title = group[0] if position else "recovery"
        steps = [(group, title), *(((name,), name) for name in group if len(group) > 1)]
        for names, label in steps:
            if deadline.passed() or loss_of(best) <= max_drop:
                break
            made = attempt(_with(best.candidate, names, label))
            better = loss_of(made) < loss_of(best)
            best = made if better else best
            if better and names == group:
                break
    for name in reversed(best.candidate.recoveries):
        enough = loss_of(best) <= max_drop
        fewer = _without(best.candidate, name)
        if deadline.passed() or frozenset(fewer.recoveries) in tried or (enough and name in groups[0]):
            continue
        made = attempt(fewer)
        best = made if loss_of(made) <= (max_drop if enough else loss_of(best)) else best
    return best


def _on_16_bits(table: TrialTable, evaluator: Evaluator, deadline: Deadline, base: Trial, progress: Progress) -> Trial:
    """`base` with all its tensors in 16 bits."""
    scheme = base.candidate.scheme.replace(**{WIDE: (ALL_NODES,)})
    candidate = base.candidate.replace(name=f"{base.name}, all tensors in 16 bits", scheme=scheme)
    made = build_and_assess(table, evaluator, candidate, "exclusion", base.name, progress)
    return in_simulation(table, evaluator, made, deadline, progress)


def _may_hold(table: TrialTable, trial: Trial) -> bool:
    """Whether it keeps the accuracy, or may: 97.5 % sure is that it does not where all of its interval is beyond."""
    return trial.judged is not None and trial.judged.low <= table.goal.max_drop


def _keep_layers_in_float(
    table: TrialTable, evaluator: Evaluator, deadline: Deadline, base: Trial, headroom: float, progress: Progress
) -> None:
    """Try `base` with layers in float, chosen by the evaluator's ranking, until it meets the goal at the least cost."""
    ranking = evaluator.rank(base.candidate, headroom=headroom, seconds=deadline.left_s())
    progress.note(f"looking for the fewest {_SPARED[ranking.field]} that let {base.name} qualify")
    named: Counter[int] = Counter()
    scheme = base.candidate.scheme

    def loss(nodes: tuple[str, ...]) -> float:
        """What `base` loses with `nodes` spared."""
        named[len(nodes)] += 1
        again = f", choice {named[len(nodes)]}" if named[len(nodes)] > 1 else ""
        field = ranking.field
        candidate = base.candidate.replace(
            name=f"{base.name}, {len(nodes)} {_SPARED[field]}{again}",
            scheme=scheme.replace(**{field: (*getattr(scheme, field), *nodes)}),
        )
        made = build_and_assess(table, evaluator, candidate, "exclusion", base.name, progress)
        return loss_of(in_simulation(table, evaluator, made, deadline, progress))

    most = table.goal.max_drop
    hopeless = math.inf if table.goal.thorough else _HOPELESS * most
    select_float_layers(ranking, loss, most, deadline.passed, headroom=headroom, hopeless=hopeless)


def _with(candidate: Candidate, names: tuple[str, ...], title: str) -> Candidate:
    return candidate.replace(name=f"{candidate.name} + {title}", recoveries=(*candidate.recoveries, *names))


def _without(candidate: Candidate, name: str) -> Candidate:
    remaining = tuple(other for other in candidate.recoveries if other != name)
    return candidate.replace(name=f"{candidate.name} - {name}", recoveries=remaining)


def _bases(table: TrialTable, evaluator: Evaluator, deadline: Deadline, float_threads: int) -> list[Trial]:
    """The most accurate trial of each structure that loses too much and is cheaper than the best that qualifies: of a
    few, first those that lose least of the ones hardly costlier than the cheapest; in a thorough search of all.

    Those whose speed could not be claimed are raced again first: a recovery takes longer.
    """
    short = _short(table, evaluator)
    doubtful = [t for t in short[:RACED] if t.timing is not None and t.timing.verdict == UNKNOWN]
    if doubtful and evaluator.timed and not deadline.passed():
        seconds = deadline.left_s(MOST_S / 2)
        again = table.qualified()[:1] + doubtful
        race_until_claimed(
            table, evaluator, deadline, again, float_threads, tie=ROUGHLY, seconds=seconds, longest=MOST_S
        )
        short = _short(table, evaluator)
    least = min((table.cost(t) for t in short), default=0.0)
    near = sorted((t for t in short if table.cost(t) <= least * _AHEAD), key=loss_of)
    bases = [*near, *short[len(near) :]]
    most = len(bases) if table.goal.thorough else _BASES
    return [_in_full(table, evaluator, t) for t in sorted(bases[:most], key=loss_of)]


def _short(table: TrialTable, evaluator: Evaluator) -> list[Trial]:
    """Cheapest first."""
    best: dict[str, Trial] = {}
    for trial in sorted((t for t in table if t.assessment), key=loss_of):
        if trial.candidate.quantized and (not evaluator.timed or _perhaps_faster(table, trial)):
            best.setdefault(structure_of(trial), trial)
    short = [t for t in best.values() if not table.meets(t) and _worthwhile(table, t)]
    return sorted(short, key=lambda t: (table.cost(t), loss_of(t)))


def _perhaps_faster(table: TrialTable, trial: Trial) -> bool:
    """Whether it was timed, and float32 is not the faster one: where speed counts, nor the one with the lower median,
    as no recovery makes it faster."""
    if trial.timing is None or trial.timing.verdict == SLOWER:
        return False
    return trial.timing.verdict == UNKNOWN or table.objective not in BY_TIME or trial.timing.share < 1


def _worthwhile(table: TrialTable, trial: Trial) -> bool:
    """Whether it would win if it qualified."""
    qualified = table.qualified()
    return not qualified or table.cheaper(trial, qualified[0])


def _no_better(table: TrialTable, trial: Trial, recovered: Trial) -> bool:
    """Whether `trial`, which loses more than `recovered`, is hardly faster than it and needs no less in float; or where
    only one of them is quantized at run time, hardly faster than what came of it. A thorough search finds out."""
    if table.objective not in BY_TIME or table.goal.thorough:
        return False
    one_kind = trial.candidate.scheme.mode == recovered.candidate.scheme.mode
    best = recovered if one_kind else table.qualified()[0]
    return table.cost(best) < table.cost(trial) * _AHEAD


def _headroom(table: TrialTable, trial: Trial, widens: bool) -> float:
    """How far a trial may go from its cost in execution towards that of all layers in float, or of all tensors in 16
    bits where it `widens`, 1 being all the way: where that is what counts, no further than the best that qualifies
    already, and where speed counts no closer to float32 than a race tells apart."""
    own = _relative_cost(table, trial)
    whole = own + WIDE_COST if widens else 1.0
    rivals = [] if table.objective in ("size", "memory") else table.qualified()[:1]
    limits = [1 - ROUGHLY] if table.objective in BY_TIME and not table.goal.thorough else []
    most = min([whole, *limits, *(_relative_cost(table, rival) for rival in rivals)])
    return max(0.0, (most - own) / (whole - own)) if own < whole else 0.0


def _relative_cost(table: TrialTable, trial: Trial) -> float:
    """Latency over float32's, 1 where it was not timed; where nothing can be timed, the share of MACs in float."""
    if table.objective == FLOAT_MACS:
        return table.cost(trial)
    return trial.timing.share if trial.timing else 1.0


def _in_full(table: TrialTable, evaluator: Evaluator, trial: Trial) -> Trial:
    if trial.assessment is not None and trial.assessment.complete:
        return trial
    found = evaluator.assess([trial.candidate], evaluator.total)
    trial = table.update(trial.name, assessment=found[trial.name])
    # It was dropped on fewer samples than there are, or for want of time: the result on all of them decides.
    return table.update(trial.name, reason="") if table.meets(trial) else trial
