"""Test accuracy from running sums: against labels, against float32's own answers, and the uncertainty of both."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edgeq.data.sample import Sample
from edgeq.measure.class_scores import probabilities
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs
from edgeq.measure.resample import ResampledMeter, RowMetrics
from edgeq.measure.tasks.anomaly import Anomaly
from edgeq.measure.tasks.classification import Classification
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.accuracy_estimate import AgreementEstimate, Regret, assess, estimate_extra_loss, rare_row_error
from edgeq.tuning.measurements import Assessment
from tests.measure.fakes import FakeSamples

RANDOM = np.random.default_rng(0)
Pairs = list[tuple[np.ndarray, np.ndarray]]


def sample(label: object = None, values: np.ndarray | None = None) -> Sample:
    return Sample("s", {"x": np.zeros((1, 7), np.float32) if values is None else values}, label)


def scores(pairs: Pairs, labels: list[int] | None = None) -> Assessment:
    """Return the assessment of pairs of scores [1, C], float32's and the candidate's."""
    task = Classification()
    agreement = AgreementEstimate(OutputSums(task if labels else None))
    metrics = ResampledMeter(task), ResampledMeter(task)
    for i, (reference, candidate) in enumerate(pairs):
        one = sample(labels[i] if labels else None)
        agreement.update({"y": reference}, {"y": candidate}, one)
        if labels:
            metrics[0].update({"y": reference}, one)
            metrics[1].update({"y": candidate}, one)
    found = (task, metrics[0].measured(), metrics[1].measured()) if labels else None
    return assess(agreement, found, complete=True)


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_without_labels_the_loss_is_what_float_thinks_was_lost() -> None:
    pairs = [(row(0.7, 0.2, 0.1), row(0.7, 0.2, 0.1))] * 3 + [(row(0.5, 0.4, 0.1), row(0.4, 0.5, 0.1))]
    found = scores(pairs)
    assert found.basis == "agreement"
    assert found.drop == pytest.approx(0.1 / 4)
    assert found.disagreement == 0.25
    assert found.drop <= found.disagreement
    assert found.low < found.drop < found.high


def test_no_loss_of_top1_exceeds_the_disagreement() -> None:
    pairs, labels = noisy(300, 1.0)
    found = scores(pairs, labels)
    assert found.disagreement is not None
    assert abs(found.drop) <= found.disagreement


def test_few_labels_are_weighed_against_what_float_thinks() -> None:
    """A lucky candidate is expected to be worse, because its outputs are, although no label shows a loss."""
    pairs = [(row(0.6, 0.4), row(0.4, 0.6)), (row(0.6, 0.4), row(0.4, 0.6))] * 20
    found = scores(pairs, [0, 1] * 20)
    assert found.drop == 0
    assert 0 < found.expected < 0.2
    assert found.bound > found.expected + found.doubt > found.expected


def test_luck_on_few_labels_does_not_pay_for_other_answers() -> None:
    """A candidate whose changed answers happen to match the labels still has an expected loss."""
    pairs = [(row(0.6, 0.4), row(0.4, 0.6))] * 4 + [(row(0.6, 0.4), row(0.6, 0.4))] * 76
    lucky, unlucky = scores(pairs, [1] * 80), scores(pairs, [0] * 80)
    assert lucky.drop < 0 < unlucky.drop
    assert 0 < lucky.expected < unlucky.expected
    assert lucky.bound > 0


def test_many_labels_have_the_last_word() -> None:
    pairs, labels = noisy(4000, 0.5)
    few, many = scores(pairs[:200], labels[:200]), scores(pairs, labels)
    assert abs(many.expected - many.drop) < abs(few.expected - few.drop) + 0.01
    assert many.high - many.low < few.high - few.low


def test_the_interval_holds_the_truth() -> None:
    """At least 52 of 60 intervals of 95 %, each from its own samples, contain the loss on all samples."""
    pairs, labels = noisy(6000, 0.7)
    truth = scores(pairs, labels).drop
    parts = [scores(pairs[i : i + 100], labels[i : i + 100]) for i in range(0, 6000, 100)]
    held = sum(p.low <= truth <= p.high for p in parts)
    assert held >= 52


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.4])
def test_as_many_other_samples_show_no_more_than_predicted(noise: float) -> None:
    """`bound` limits the model's loss over all samples. On as many other samples the loss is only larger by chance."""
    count, size = 40_000, 100
    random = np.random.default_rng(3)
    labels = random.integers(0, 5, count)
    # With twice the distance between the classes' centres, the softmax is the true probability.
    reference = (2 * random.normal(0, 1, (count, 5)) + 4 * np.eye(5)[labels]).astype(np.float32)
    candidate = reference + 2 * random.normal(0, noise, (count, 5)).astype(np.float32)
    right = [(made.argmax(1) == labels).astype(np.float64) for made in (reference, candidate)]
    losses = (right[0] - right[1]).reshape(-1, size)
    held = []
    for i, unseen in zip(range(0, count, 2 * size), losses[1::2], strict=True):
        seen = slice(i, i + size)
        agreement = AgreementEstimate()
        one = sample(values=np.zeros((size, 7), np.float32))
        agreement.update({"y": reference[seen]}, {"y": candidate[seen]}, one, rows=size)
        metered = [RowMetrics({"top1": scored[seen].mean()}, scored[seen]) for scored in right]
        found = assess(agreement, (Classification(), *metered), complete=True)
        held.append(
            (unseen.mean() <= found.prediction_bound, unseen.mean() <= found.bound, losses.mean() <= found.bound)
        )
    predicted, bounded, true = np.mean(held, axis=0)
    assert predicted >= 0.87
    assert bounded < 0.85
    assert true >= 0.9


def noisy(count: int, scale: float) -> tuple[Pairs, list[int]]:
    random = np.random.default_rng(3)
    labels = random.integers(0, 5, count)
    reference = random.normal(0, 1, (count, 5)) + 2 * np.eye(5)[labels]
    candidate = reference + random.normal(0, scale, (count, 5))
    pairs = [
        (r[None].astype(np.float32), c[None].astype(np.float32)) for r, c in zip(reference, candidate, strict=True)
    ]
    return pairs, [int(label) for label in labels]


def test_an_embedding_is_no_classifier() -> None:
    vectors = RANDOM.normal(0, 0.05, (40, 1, 64)).astype(np.float32)
    found = scores([(v, v + 0.01) for v in vectors])
    assert found.disagreement is None
    assert found.drop == pytest.approx(1 - found.cosine)


def test_a_broken_output_loses_everything() -> None:
    found = scores([(row(0.7, 0.3), row(math.nan, 0.3))] * 8)
    assert found.bound == 1.0
    assert found.low == 1.0


def test_scores_that_sum_to_one_are_probabilities_others_get_a_softmax() -> None:
    given = np.array([[0.25, 0.75], [1.0, 0.0]])
    assert probabilities(given) is given
    made = probabilities(np.array([[0.0, math.log(3)], [1e4, -1e4]]))
    assert made == pytest.approx(np.array([[0.25, 0.75], [1.0, 0.0]]))


def test_a_metric_that_is_no_mean_counts_its_doubt() -> None:
    """A metric that is not a mean has an uncertainty, so that a lucky candidate does not qualify."""
    task = Anomaly()
    good, bad = ResampledMeter(task), ResampledMeter(task)
    agreement = AgreementEstimate()
    for i in range(160):
        label = i % 2
        given = np.zeros((1, 4), np.float32)
        made = np.full((1, 4), label + 0.1 * RANDOM.normal(), np.float32)
        worse = made + RANDOM.normal(0, 1, (1, 4)).astype(np.float32)
        one = sample(label, given)
        outputs: list[Outputs] = [{"y": made}, {"y": worse}]
        good.update(outputs[0], one)
        bad.update(outputs[1], one)
        agreement.update(outputs[0], outputs[1], one)
    found = assess(agreement, (task, good.measured(), bad.measured()), complete=False)
    assert found.drop > 0.01
    assert found.low < found.drop < found.high
    assert found.expected == found.drop
    assert found.doubt == pytest.approx((found.high - found.drop) / 1.96)
    assert found.bound > found.drop + found.doubt
    assert not found.complete
    better = assess(agreement, (task, bad.measured(), good.measured()), complete=True)
    assert better.drop < 0 < better.bound, "to seem better than float32 is luck"
    seen = assess(agreement, (task, good.measured(), bad.measured()), complete=True, loss_kind="seen")
    assert seen.bound == seen.drop == found.drop


@pytest.mark.parametrize(("moves", "doubts"), [(0.05, (0.005, 0.01)), (1e-6, (0.0, 1e-9))], ids=["int8", "float"])
def test_unchanged_classes_are_uncertain_if_scores_move_as_far_as_the_lead(
    moves: float, doubts: tuple[float, float]
) -> None:
    """A loss is uncertain if scores move as far as the best class leads, even if no class changes.

    F1 is then the same in all halves of the samples, and its spread is 0.
    """
    leads = np.linspace(0.0, 0.3, 153)[2:].astype(np.float32)
    agreement = AgreementEstimate(OutputSums(Classification()))
    for i, lead in enumerate(leads):
        reference = row(2 + lead, 2, 0)
        moved = row(2 + lead + moves * (-1 if i >= 100 else 1), 2, 0)
        agreement.update({"y": reference}, {"y": moved}, sample())
    same = RowMetrics({"f1": 0.9}, None, np.full(32, 0.9))
    task = SimpleNamespace(primary="f1", higher_is_better=True)
    found = assess(agreement, (task, same, same), complete=True)  # type: ignore[arg-type]
    assert found.disagreement == 0
    assert doubts[0] <= found.doubt <= doubts[1]
    assert found.bound == pytest.approx(1.81 * found.doubt, rel=0.01)


def test_the_classes_expected_to_change_are_all_pairs_of_a_lead_and_a_move() -> None:
    regret = Regret()
    reference, candidate = RANDOM.normal(0, 1, (60, 4)), RANDOM.normal(0, 1, (60, 4))
    regret.update(reference[:25], candidate[:25])
    regret.update(reference[25:], candidate[25:])
    pairs = 0
    for i in range(60):
        for j in range(60):
            first, best = reference[i].argmax(), reference[j].argmax()
            move = margin(reference[j], best) - margin(candidate[j], best)
            pairs += margin(reference[i], first) <= move
    assert regret.changing == pytest.approx(pairs / 60)
    assert rare_row_error(RowMetrics({}), regret, 60) == pytest.approx(2**0.5 / 60)


def margin(scores: np.ndarray, best: np.intp) -> float:
    return float(scores[best] - np.delete(scores, best).max())


def test_without_classes_nothing_is_added_but_to_a_mean() -> None:
    assert rare_row_error(RowMetrics({}), None, 50) == 0
    assert rare_row_error(RowMetrics({}, np.zeros(50)), None, 50) == 1 / 50
    assert rare_row_error(RowMetrics({}, np.zeros(50)), Regret(), 50) == 1 / 50


def test_an_unknown_spread_gives_the_whole_scale() -> None:
    agreement = AgreementEstimate()
    agreement.update({"y": row(1, 0)}, {"y": row(1, 0)}, sample())
    reference = RowMetrics({"auc": 0.9}, None, np.array([0.9, np.nan, 0.8]))
    candidate = RowMetrics({"auc": 0.8}, None, np.array([0.8, 0.7, 0.7]))
    found = assess(agreement, (Anomaly(), reference, candidate), complete=True)
    assert found.drop == pytest.approx(0.1)
    assert (found.low, found.high) == (-1.0, 1.0)


def test_bounds_for_all_samples_hold_with_the_claimed_confidence() -> None:
    random = np.random.default_rng(0)
    total, runs, broken, nearer = 400, 400, 0, 0
    for _ in range(runs):
        losses = random.normal(0.02, 0.2, total)

        def after(samples: int, losses: np.ndarray = losses) -> Assessment:
            seen = losses[:samples]
            mean, error = float(seen.mean()), float(seen.std(ddof=1)) / samples**0.5
            low, high = mean - 1.96 * error, mean + 1.96 * error
            return Assessment(samples, samples == total, "labels", mean, low, high, expected=mean, doubt=error)

        half, whole = after(total // 2), after(total)
        broken += half.least_bound(0.5) > whole.bound
        nearer += half.least_bound(0.5) > half.low
        assert whole.least_bound(1.0) == pytest.approx(whole.bound)
    assert broken <= 0.05 * runs
    assert nearer == runs


@pytest.mark.parametrize("ends", [{"low": -1.0, "high": 1.0}, {"low": 0.0, "high": 1.0}])
def test_nothing_is_claimed_of_all_samples_where_the_doubt_is_not_known(ends: dict[str, float]) -> None:
    assert Assessment(10, False, "agreement", 0.5, expected=0.5, **ends).least_bound(0.5) == ends["low"]


class Answers:
    """Give scores for the number in the input."""

    def __init__(self, wrong: set[int], score: float = 1) -> None:
        self.wrong, self.score = wrong, score

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="x", shape=[1, 1])]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="y")]

    def run(self, names: object, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        number = int(feed["x"][0, 0])
        return [row(0, self.score) if number in self.wrong else row(self.score, 0)]


def test_a_loss_in_a_slow_engine_is_the_loss_here_and_what_is_lost_more_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.tuning.accuracy.open_session", lambda path: Answers(set()))
    numbers = [sample(0, np.full((1, 1), number, np.float32)) for number in range(100)]
    meter = AccuracyMeter(
        FakeSamples(numbers), tmp_path / "float.onnx", tmp_path, task=Classification(), loss_kind="seen"
    )
    first = [int(meter.samples[position].inputs["x"][0, 0]) for position in range(20)]
    others = sorted(set(range(100)) - set(first))
    here = Answers({first[0], *others[:4]})
    there = Answers({first[0], first[1], *others[:4]})
    whole = meter.assess("m", lambda: here, 100, lambda count: None)
    assert whole.drop == pytest.approx(0.05)
    part, reach = meter.simulate("m", here, there, 20, whole, lambda count: None)
    assert part.samples == 20
    # One more answer of 20 is wrong and the noise is twice as large. Both mean a loss of 5 points.
    assert part.drop == pytest.approx(0.05 + 1 / 20)
    assert part.complete
    assert part.low < part.drop - reach < part.drop + reach < part.high
    assert part.high - part.low > whole.high - whole.low
    every, reach = meter.simulate("m", here, there, 100, whole, lambda count: None)
    assert every.drop == pytest.approx(0.06)
    assert reach == 0
    assert every.metrics == {**every.metrics, "top1": pytest.approx(0.94)}


def test_a_few_samples_on_which_an_engine_answers_alike_are_no_certainty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeq.tuning.accuracy.open_session", lambda path: Answers(set()))
    numbers = [sample(0, np.full((1, 1), number, np.float32)) for number in range(100)]
    meter = AccuracyMeter(FakeSamples(numbers), tmp_path / "float.onnx", tmp_path, task=Classification())
    here, there = Answers(set(), 0.9), Answers(set(), 0.8)
    whole = meter.assess("m", lambda: here, 100, lambda count: None)
    found, reach = meter.simulate("m", here, there, 20, whole, lambda count: None)
    assert found.low < found.drop == 0 < found.high
    assert reach > 0


def measured(drop: float, sqnr_db: float, high: float = 0.02, samples: int = 24) -> Assessment:
    return Assessment(samples, True, "labels", drop, drop - 0.02, high, drop, sqnr_db=sqnr_db)


def test_roundings_cost_what_their_noise_says_and_not_what_a_changed_answer_of_few_does() -> None:
    here, there = measured(0.0, 17.0), measured(1 / 24, 16.9)
    more, error = estimate_extra_loss(here, there, 1 / 24, overall=measured(0.004, 17.0, samples=500), between_db=26.0)
    assert 0 < more < 0.003
    assert error is not None
    assert 0 < error < 0.005


def test_labels_decide_between_engines_with_other_answers() -> None:
    here, there = measured(0.0, 17.0), measured(0.6, -3.0)
    more, error = estimate_extra_loss(here, there, 0.1, overall=measured(0.004, 17.0), between_db=-3.0)
    assert more > 0.2
    assert error is not None
    assert more - 2 * error > 0.01


def test_a_model_that_surely_loses_nothing_here_may_lose_there() -> None:
    here, there = measured(0.0, 17.0), measured(1.0, -3.0)
    more, error = estimate_extra_loss(
        here, there, 0.2, overall=measured(0.0, 17.0, high=0.0, samples=60), between_db=-3.0
    )
    assert error is not None
    assert more - 2 * error > 0.01


def test_the_same_answers_lose_the_same() -> None:
    assert estimate_extra_loss(measured(0.1, 17.0), measured(0.1, 17.0), 0.02, measured(0.01, 17.0), math.inf) == (
        0.0,
        0.0,
    )
    assert estimate_extra_loss(measured(0.1, 17.0), measured(0.2, 12.0), None, measured(0.01, 17.0), 13.0)[1] is None
