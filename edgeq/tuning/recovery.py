"""Recover candidates that are cheap but lose too much with all recoveries that cost no speed: recoveries that cost
speed first, layers in float last.
"""

from __future__ import annotations

from collections import Counter

from edgeq_device.measure.claim import SLOWER, UNKNOWN

from edgeq.hardware.profile import Profile
from edgeq.scheme import ALL_NODES
from edgeq.tuning.float_layers import EXCLUDE, WIDE, select_float_layers
from edgeq.tuning.judge import assess_in_full, build_and_assess, simulate_trial
from edgeq.tuning.race import RACE_S, race_new, race_until_claimed
from edgeq.tuning.space import engine_name
from edgeq.tuning.trials import WIDE_COST, Trial, Trials

# Fields of a scheme that a ranking may choose nodes for, as words in the names of candidates.
_FIELD_TITLES = {EXCLUDE: "layers in float", "wide": "tensors in 16 bits", "eight_bit": "products in 8 bits"}
_EXCLUSION_REASON = "kept in float to lose less accuracy"


def recover_accuracy(trials: Trials, profile: Profile) -> None:
    """Repair candidates that are cheaper than the best qualifying candidate, so that they qualify as well: each kernel
    choice only once, in the engine that runs it fastest.

    If tensors may have 16 bits, all of them get 16 bits first. The result is often usable, but has more bits than
    needed. If even that result certainly loses too much, smaller sets of tensors are not tried.
    """
    recovered: list[Trial] = []
    for short in _select_bases(trials):
        base = simulate_trial(trials, short)
        if trials.deadline.passed():
            return
        race_new(trials)
        if not _is_worthwhile(trials, base) or any(_is_no_better(trials, base, former) for former in recovered):
            continue
        qualified_names = {trial.name for trial in trials.qualified()}
        _recover(trials, base, profile)
        if any(trial.name not in qualified_names for trial in trials.qualified()):
            recovered.append(base)


def _recover(trials: Trials, base: Trial, profile: Profile) -> None:
    """Recover `base`: by recoveries that cost speed, by all tensors in 16 bits if the hardware has them, and by layers
    in float if the hardware has float.
    """
    widens = WIDE in profile.search
    best = _add_costly_recoveries(trials, base)
    # Layers in float are the last resort, because they cost the most speed.
    if trials.meets(best) or trials.deadline.passed() or (profile.integer_only and not widens):
        return
    widest = _build_on_16_bits(trials, best) if widens else None
    # If even the lower end of the loss's interval is above the limit, it is 97.5 % certain that the candidate loses too
    # much.
    if widest is None or (widest.final_assessment is not None and widest.final_assessment.low <= trials.goal.limit):
        _keep_layers_in_float(trials, best, _find_headroom(trials, base, widens))


def _add_costly_recoveries(trials: Trials, base: Trial) -> Trial:
    """Return `base` with all recoveries, those that cost speed as well, or `base` if it loses less without them."""
    names = [name for group in trials.evaluator.recovery_groups()[1:] for name in group]
    if not names or base.candidate.scheme.mode != "static" or base.candidate.builder:
        return base
    candidate = base.candidate.replace(
        name=f"{base.name} + {' + '.join(names)}", recoveries=(*base.candidate.recoveries, *names)
    )
    trial = build_and_assess(trials, candidate, "recovery", base.name)
    return trial if trial.loss < base.loss else base


def _build_on_16_bits(trials: Trials, base: Trial) -> Trial:
    """Build and assess `base` with all its tensors in 16 bits."""
    scheme = base.candidate.scheme.replace(**{WIDE: (ALL_NODES,)})
    candidate = base.candidate.replace(name=f"{base.name}, all tensors in 16 bits", scheme=scheme)
    return build_and_assess(trials, candidate, "exclusion", base.name)


def _keep_layers_in_float(trials: Trials, base: Trial, headroom: float) -> None:
    """Try `base` with layers in float, chosen by the evaluator's ranking, until it meets the goal at the least cost."""
    ranking = trials.evaluator.rank(base.candidate, headroom=headroom, seconds=trials.deadline.remaining_s())
    field, scheme, max_drop = ranking.field, base.candidate.scheme, trials.goal.limit
    trials.progress.note(f"looking for the fewest {_FIELD_TITLES[field]} that let {base.name} qualify")
    set_sizes: Counter[int] = Counter()

    def loss(nodes: tuple[str, ...]) -> float:
        """Return the loss of `base` if `nodes` are kept in float, or get more bits."""
        set_sizes[len(nodes)] += 1
        suffix = f", choice {set_sizes[len(nodes)]}" if set_sizes[len(nodes)] > 1 else ""
        if field == EXCLUDE:
            changed_scheme = scheme.keep_in_float(nodes, _EXCLUSION_REASON)
        else:
            changed_scheme = scheme.replace(**{field: (*getattr(scheme, field), *nodes)})
        candidate = base.candidate.replace(
            name=f"{base.name}, {len(nodes)} {_FIELD_TITLES[field]}{suffix}", scheme=changed_scheme
        )
        return build_and_assess(trials, candidate, "exclusion", base.name).loss

    hopeless = trials.pace.hopeless * max_drop
    select_float_layers(
        ranking,
        loss,
        max_drop,
        trials.deadline.passed,
        headroom=headroom,
        hopeless=hopeless,
    )


def _select_bases(trials: Trials) -> list[Trial]:
    """Return a limited number of trials to recover: the most accurate trials of structures that lose too much but are
    cheaper than the best qualifying trial. Trials about as cheap as the cheapest come first, and among these, the
    trials that lose least.

    If the speed of a trial could not be claimed, it is timed again first, because a recovery takes longer than a race.
    """
    short = _list_short(trials)
    doubtful = [t for t in short[: trials.pace.finalists] if t.timing is not None and t.verdict == UNKNOWN]
    if doubtful and not trials.deadline.passed():
        runners = trials.qualified()[:1] + doubtful
        race_until_claimed(trials, runners, trials.deadline.remaining_s(RACE_S / 2), RACE_S, rough=True)
        short = _list_short(trials)
    contenders = [t for t in short if trials.cost(t) <= trials.cost(short[0]) * (1 + trials.pace.gain)]
    bases = [*sorted(contenders, key=lambda t: t.loss), *short[len(contenders) :]][: trials.pace.recovered]
    return [_reconsider(trials, t) for t in sorted(bases, key=lambda t: t.loss)]


def _list_short(trials: Trials) -> list[Trial]:
    """Return the trials that lose too much, the cheapest first: of each structure the most accurate trial, and of each
    kernel choice the trial in the engine that runs it fastest.
    """
    best: dict[str, Trial] = {}
    for trial in sorted((t for t in trials if t.assessment), key=lambda t: t.loss):
        if trial.candidate.quantized and _may_be_faster(trials, trial):
            best.setdefault(trial.structure, trial)
    short = [t for t in best.values() if not trials.meets(t) and _is_worthwhile(trials, t)]
    fastest_engine: dict[str, str] = {}

    def is_in_fastest_engine(trial: Trial) -> bool:
        """Return whether no other engine ran the same kernel choice faster. Ranges do not change the speed."""
        scheme = trial.candidate.scheme.replace(method="minmax", method_options={})
        engine = engine_name(trial.candidate)
        return fastest_engine.setdefault(f"{scheme} {trial.candidate.builder}", engine) == engine

    return [t for t in sorted(short, key=lambda t: (trials.cost(t), t.loss)) if is_in_fastest_engine(t)]


def _may_be_faster(trials: Trials, trial: Trial) -> bool:
    """Return whether a trial was timed, and float32 is not certainly faster. If speed is the objective, the trial's
    median must also be below float32's, because no recovery makes a trial faster.
    """
    if trial.timing is None or trial.verdict == SLOWER:
        return False
    return trial.verdict == UNKNOWN or not trials.by_time or trial.latency < 1


def _is_worthwhile(trials: Trials, trial: Trial) -> bool:
    """Return whether a trial would win if it qualified."""
    qualified = trials.qualified()
    return not qualified or trials.is_cheaper(trial, qualified[0])


def _is_no_better(trials: Trials, trial: Trial, recovered: Trial) -> bool:
    """Return whether recovering `trial`, which loses more than `recovered`, cannot give a better result.

    If both have the same quantization mode, `trial` needs at least as many layers in float. So `trial` is worth
    recovering only if it is clearly faster than `recovered`. With another mode, it must be clearly faster than the best
    trial that already qualifies.
    """
    one_kind = trial.candidate.scheme.mode == recovered.candidate.scheme.mode
    best = recovered if one_kind else trials.qualified()[0]
    return trials.by_time and trials.cost(best) < trials.cost(trial) * (1 + trials.pace.gain)


def _find_headroom(trials: Trials, trial: Trial, widens: bool) -> float:
    """Return by how much the cost of a trial may grow. 0 means not at all. 1 means up to the cost of all layers in
    float or, if the hardware `widens`, of all tensors in 16 bits.

    If speed is the objective, the trial must stay faster than float32 by a difference that a race can measure. Unless
    size or memory is the objective, it may not become slower than the best trial that already qualifies.
    """

    def cost(timed: Trial) -> float:
        """Return the latency relative to float32's. If the trial was not timed, return at most 1."""
        return min(timed.latency, 1.0) if timed.timing is None else timed.latency

    base_cost = cost(trial)
    full_cost = base_cost + WIDE_COST if widens else 1.0
    rivals = [] if trials.objective in ("size", "memory") else trials.qualified()[:1]
    limits = [1 - trials.pace.equal] if trials.by_time else []
    limit = min([full_cost, *limits, *(cost(rival) for rival in rivals)])
    return max(0.0, (limit - base_cost) / (full_cost - base_cost)) if base_cost < full_cost else 0.0


def _reconsider(trials: Trials, trial: Trial) -> Trial:
    """Return `trial` with its accuracy on all samples. The search may have dropped it after fewer samples, or because
    the time ran out.
    """
    if trial.assessment is not None and trial.assessment.complete:
        return trial
    trial = assess_in_full(trials, trial)
    return trials.update(trial.name, reason="") if trials.meets(trial) else trial
