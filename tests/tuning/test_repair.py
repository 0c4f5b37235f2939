"""Test how a repair chooses what to build, with invented figures."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from edgeq.tuning.repair import _correct_share


@given(exponent=st.floats(0.5, 2.0), remaining=st.floats(0.01, 0.99), allowed=st.floats(0.001, 0.9))
def test_one_measurement_gives_the_set_that_a_power_law_needs(
    exponent: float, remaining: float, allowed: float
) -> None:
    assume(remaining**exponent > 1e-3 * allowed)  # a smaller loss counts as this one
    share = _correct_share(remaining, remaining**exponent, allowed)
    assert share**exponent == pytest.approx(0.8 * allowed, rel=1e-6)
