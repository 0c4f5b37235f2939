"""Test the comparison of one model's errors in two runtimes."""

from __future__ import annotations

import numpy as np
import pytest

from edgeq.measure.paired import MOST_LOSS_DB, PairedLoss, measure_paired_losses

RANDOM = np.random.default_rng(0)


def losses(local_noise: float, target_noise: float, *, samples: int = 16, spread: float = 0.0) -> PairedLoss:
    """Return the loss with errors of these deviations. `spread` is the deviation of their logarithm over samples."""
    reference = [{"y": RANDOM.normal(size=200)} for _ in range(samples)]

    def noisy(deviation: float) -> list[dict[str, np.ndarray]]:
        sizes = deviation * np.exp(RANDOM.normal(0, spread, samples)) if spread else np.full(samples, deviation)
        return [
            {"y": outputs["y"] + RANDOM.normal(0, size, 200)} for outputs, size in zip(reference, sizes, strict=True)
        ]

    (loss,) = measure_paired_losses(reference, noisy(local_noise), noisy(target_noise))
    return loss


def test_equal_noise_is_not_a_loss() -> None:
    loss = losses(0.05, 0.05)
    assert abs(loss.loss_db) < loss.reach_db + 0.5
    assert not loss.proven


def test_noise_that_every_sample_shows_is_a_proven_loss() -> None:
    loss = losses(0.05, 0.15)
    assert loss.loss_db == pytest.approx(9.5, abs=0.7)
    assert loss.proven


def test_one_bad_sample_among_many_proves_nothing() -> None:
    reference = [{"y": RANDOM.normal(size=200)} for _ in range(16)]
    local_outputs = [{"y": outputs["y"] + RANDOM.normal(0, 0.05, 200)} for outputs in reference]
    target_outputs = [
        {"y": outputs["y"] + RANDOM.normal(0, 0.05 if place else 0.4, 200)} for place, outputs in enumerate(reference)
    ]
    (loss,) = measure_paired_losses(reference, local_outputs, target_outputs)
    assert loss.loss_db > MOST_LOSS_DB
    assert not loss.proven


def test_equal_runtimes_are_rarely_told_apart_on_few_uneven_samples() -> None:
    assert sum(losses(0.05, 0.05, spread=1.0).proven for _ in range(200)) <= 10


def test_almost_exact_outputs_are_not_a_loss() -> None:
    assert not losses(1e-9, 1e-5).proven


def test_the_interval_is_known_to_be_unknown_on_one_sample() -> None:
    assert not losses(0.05, 0.08, samples=1).proven
    assert losses(0.05, 0.5, samples=1).proven


def test_outputs_that_are_no_floats_are_left_out() -> None:
    integers = [{"index": np.arange(3)}]
    assert measure_paired_losses(integers, integers, integers) == ()
