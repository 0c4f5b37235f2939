"""Set how early a search dismisses candidates: the thresholds of each effort, and differences that count as equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

EQUAL = 0.02
"""Costs that differ by a smaller share than this count as equal, and then the more accurate candidate wins. A race is
too short to settle a smaller difference.
"""
BEHIND = 0.1
"""A candidate that takes longer by this share is behind. On a quiet machine, races minutes apart differ by less."""
SQNR_BEHIND_DB = 6.0
"""A candidate is less accurate if the SQNR of its outputs is lower by this many decibels, which is one bit of every
value.
"""
# Larger than any model has layers, methods or structures, so a limit of this size never limits.
_ALL = 1_000_000


@dataclass(frozen=True)
class Pace:
    """Set how early a search dismisses candidates that are unlikely to win.

    Attributes:
        halvings: number of rounds that measure accuracy on part of the samples. Each round uses twice as many samples
            as the one before.
        equal: share by which two speeds must differ to count as different. A race need not settle a smaller difference.
        first_races: duration of each of the first races, as a share of the last race's duration.
        behind: a candidate that takes longer by this share is behind.
        threads: if one number of threads is faster than all others by this share in onnxruntime's own kernels, a
            plug-in gets that number without a race, because opening a plug-in may take seconds.
        gain: a second candidate must be faster by this share to be recovered in addition to the first.
        sqnr_db: a candidate is dropped if another one is as fast and has outputs whose SQNR is higher by this many
            decibels.
        alike_db: like `sqnr_db`, but for candidates that one plug-in runs about equally fast. The limit is separate
            because a plug-in may take seconds to compile each calibration method.
        methods: number of calibration methods to try in a plug-in.
        recovered: number of kernel choices that get recoveries that cost speed.
        finalists: number of structures in the last race.
        hopeless: multiple of the allowed loss. A candidate is given up if it loses more than that even with as many
            layers in float as it may have.
    """

    halvings: int = 3
    equal: float = EQUAL
    first_races: float = 0.25
    behind: float = BEHIND
    threads: float = 0.5
    gain: float = BEHIND
    sqnr_db: float = SQNR_BEHIND_DB
    alike_db: float = 0.0
    methods: int = 2
    recovered: int = 2
    finalists: int = 4
    hopeless: float = 3.0


# Infinite shares and decibels switch a rule off: no candidate is ever that far behind.
THOROUGH = Pace(
    halvings=0,
    equal=0.0,
    first_races=1.0,
    behind=math.inf,
    threads=math.inf,
    gain=0.0,
    sqnr_db=math.inf,
    alike_db=math.inf,
    methods=_ALL,
    recovered=_ALL,
    finalists=_ALL,
    hopeless=math.inf,
)
"""Nothing is dismissed early."""
