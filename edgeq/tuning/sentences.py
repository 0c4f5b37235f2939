"""Write sentences about trials: what they lose, how fast they are, and why one was dropped for another.

A function returns "" if there is nothing to say, so callers may test the sentence itself.
"""

from __future__ import annotations

import math

from edgeq_device.measure.claim import UNKNOWN

from edgeq.measure.structure_timing import StructureTiming
from edgeq.tuning.measurements import Assessment
from edgeq.tuning.trials import Trial

_MIN_NOISE = 1e-20


def format_points(loss: float) -> str:
    """Write a loss as a fraction in points: 0.0123 is "1.23 points"."""
    return f"{100 * loss:.2f} points"


def describe_drop(loss: float) -> str:
    """Write that a trial loses or gains points. A negative loss is a gain."""
    points = format_points(abs(loss))
    return f"gains {points}" if loss < 0 and points != format_points(0.0) else f"loses {points}"


def describe_loss(assessment: Assessment) -> str:
    """Write the loss on the samples, and how large it may be over many other samples. If the loss is noise, write the
    SQNR.
    """
    if assessment.basis == "noise":
        return f"has {format_decibels(assessment.drop)} SQNR"
    # Compare the texts, not the numbers, because a bound that reads the same says nothing more.
    text, bound = describe_drop(assessment.drop), format_points(max(assessment.bound, 0.0))
    if bound == format_points(assessment.drop):
        return text
    return f"{text}, {'up to' if text.startswith('loses') else 'loses up to'} {bound} over many other samples"


def describe_allowed_loss(assessment: Assessment, max_drop: float) -> str:
    """Write the allowed loss, in the unit of the loss in `assessment`."""
    if assessment.basis == "noise":
        return f"{format_decibels(max_drop)} are wanted"
    return f"{format_points(max_drop)} are allowed"


def format_decibels(noise: float) -> str:
    """Write noise power over signal power as SQNR."""
    return f"{0 - 10 * math.log10(max(noise, _MIN_NOISE)):.1f} dB"


def describe_simulated_loss(assessment: Assessment) -> str:
    """Write the loss in a simulator of the target, with its interval and the number of samples."""
    loss = f"{describe_drop(assessment.drop)} in the simulator"
    return f"{loss}{describe_interval(assessment)}, {assessment.samples} samples"


def describe_speed(timing: StructureTiming | None, of: str = "") -> str:
    """Write the speed relative to float32 with its interval, or an estimate that is marked as an estimate; "" if there
    is no ratio.
    """
    claim = timing.speedup if timing is not None else None
    if claim is None:
        return ""
    whose = f"{of}'s" if of else "its"
    if claim.interval is not None:
        return f"{claim.interval[0]:.2f} times {whose} speed ({claim.figures()})"
    about = claim.estimated
    return f"about {about[0]:.2f} times {whose} speed ({claim.figures()})" if about else "a speed that is not known"


def describe_speed_against_float(timing: StructureTiming | None) -> str:
    """Write how certainly a trial is faster or slower than float32, with its speed."""
    claim = timing.speedup if timing is not None else None
    spread = claim and (claim.interval or claim.estimated)
    if not claim or not spread:
        return f"its speed is not known: {(claim and claim.reason) or 'too few pairs of runs'}"
    comparison = "slower than float32" if spread[2] < 1 else "faster than float32" if spread[1] > 1 else ""
    if claim.interval is None:
        comparison = f"{comparison} only by an estimate" if comparison else "it is not shown to be faster than float32"
    return f"{comparison or 'no difference in speed from float32 is settled'}: {describe_speed(timing)}"


def describe_unclaimed(*trials: Trial) -> str:
    """Write why the speeds of `trials` cannot be compared: the reason of the first trial whose speed cannot be claimed.
    Return "" if the speeds of all timed trials can be claimed.
    """
    claims = (t.timing.speedup for t in trials if t.timing is not None and t.verdict == UNKNOWN)
    return next(((claim and claim.reason) or "too few pairs of runs" for claim in claims), "")


def describe_delay(trial: Trial, faster: Trial) -> str:
    """Write how much longer `trial` takes than `faster`, or why that is unknown."""
    # A ratio of two speeds that cannot be claimed would look like a measurement.
    if describe_unclaimed(trial, faster):
        return (
            f"not distinguishable in speed from {faster.name}: it runs at {describe_speed(trial.timing, of='float32')}"
        )
    return f"{trial.latency / faster.latency:.2f} times the latency of {faster.name}"


def describe_hopeless(assessment: Assessment, max_drop: float) -> str:
    """Write why a candidate was not measured on all samples."""
    loss = f"{describe_loss(assessment)} after {assessment.samples} samples"
    if assessment.basis == "noise":
        return f"{loss}; {describe_allowed_loss(assessment, max_drop)}"
    return f"{loss}; 97.5 % sure that it loses more than {format_points(max_drop)} on all samples"


def describe_lower_accuracy(trial: Trial, better: Trial) -> str:
    """Write why `better` is preferred to `trial`, which is equally fast."""
    loss, better_loss = (
        format_points(t.assessment.bound) if t.assessment else "nothing known" for t in (trial, better)
    )
    # If the bounds read the same, the choice was made by SQNR, so name that instead.
    if loss != better_loss:
        return f"and loses up to {loss}, not {better_loss}"
    a, b = (t.assessment.sqnr_db if t.assessment else 0.0 for t in (trial, better))
    return f"as accurate, and its outputs are further from float32's (SQNR {a:.1f} dB, not {b:.1f})"


def describe_interval(assessment: Assessment) -> str:
    """Write the interval of a loss. If it covers the whole scale, nothing is known; return ""."""
    low, high = assessment.low, assessment.high
    if high - low >= 1:
        return ""
    # Of two losses, neither needs a word.
    return (
        f" ({format_points(low)} to {format_points(high)})"
        if low >= 0
        else (
            f" ({describe_drop(low)} to {describe_drop(high)})".replace("gains", "a gain of").replace(
                "loses", "a loss of"
            )
        )
    )
