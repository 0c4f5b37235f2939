"""Compare a model's figures with those of answers that ignore the inputs, to find reasons to doubt them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeq.measure.task import Meter

CONFIDENT = 2.0
"""Number of standard errors between a figure and the ends of its interval."""
_LEAST_SKILL = 0.25
"""The least share of the way from chance to perfection that a model in use covers."""


@dataclass(frozen=True)
class Skill:
    """Compare a model's answers with answers that do not depend on the inputs.

    Attributes:
        figure: text with the model's figure and the number of samples, such as "top-1 is 12 % on 64 rows".
        chance: the same figure of answers that ignore the inputs; 1 is perfect.
        low, high: interval of the model's figure, `CONFIDENT` standard errors to each side.
        shown_chance: `chance` as text.
        fix: likely causes, and what to do about them.
    """

    figure: str
    chance: float
    low: float
    high: float
    shown_chance: str
    fix: str

    @property
    def better(self) -> bool:
        """Return whether the model is certainly better than chance."""
        return self.low > self.chance

    @property
    def missing(self) -> bool:
        """Return whether the model certainly lacks the skill of a model in use. On few samples, this is never certain,
        because a hard set of samples may look the same.
        """
        return not self.better and self.high < self.chance + _LEAST_SKILL * (1 - self.chance)

    @property
    def doubt(self) -> str:
        """Return a sentence for a model that is not certainly better than chance."""
        return (
            f"{self.figure}, no better than a guess ({self.shown_chance}): a loss against it proves nothing. {self.fix}"
        )


def score_interval(right: float, rows: int) -> tuple[float, float]:
    """Return the interval of a share of which `right` of `rows` were seen (E. Wilson, 1927)."""
    squared = CONFIDENT**2
    # Wilson's interval stays inside 0 to 1, also if all rows or none are right.
    centre = (right + squared / 2) / (rows + squared)
    reach = CONFIDENT / (rows + squared) * math.sqrt(right * (rows - right) / rows + squared / 4)
    return centre - reach, centre + reach


def read_skill(meter: Meter) -> Skill | None:
    """Return the comparison of a meter's figures with chance. Return None if the meter does not compare them."""
    return meter.skill() if hasattr(meter, "skill") else None


def find_doubts(meter: Meter) -> tuple[str, ...]:
    """Return reasons to doubt a meter's figures, one sentence each."""
    notes = tuple(meter.notes()) if hasattr(meter, "notes") else ()
    skill = read_skill(meter)
    # A note names the cause, and the comparison with chance only the effect.
    return notes or ((skill.doubt,) if skill is not None and not skill.better else ())
