from __future__ import annotations

import pytest

from edgeq.backends.systolic.emit_c.builder import output_scale
from edgeq.backends.systolic.program import ArrayConfig
from edgeq.errors import ModelError

SHIFT = ArrayConfig(output_scale="shift")


def test_scales_as_the_array_takes_them() -> None:
    assert output_scale(0.25, ArrayConfig(), "conv_1") == "0.25f"
    assert [output_scale(2.0**-n, SHIFT, "conv_1") for n in (0, 1, 31)] == ["0", "1", "31"]


@pytest.mark.parametrize("value", [0.3, 2.0, 2.0**-32])
def test_refuses_scales_that_no_shift_expresses(value: float) -> None:
    with pytest.raises(ModelError, match=r"conv_1.*not a right shift"):
        output_scale(value, SHIFT, "conv_1")
