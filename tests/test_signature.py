"""Compare the inputs and outputs of two models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeq.signature import Signature, TensorSpec, is_interchangeable, signature_differences

F32 = np.dtype(np.float32)


def spec(name: str, *shape: int | str | None, dtype: Any = F32) -> TensorSpec:
    return TensorSpec(name, np.dtype(dtype), shape)


def test_signatures() -> None:
    a = Signature((spec("x", 1, 3), spec("m", 1)), (spec("y", 1),))
    b = Signature((spec("x", 1, 4),), (spec("y", 1), spec("z", 1)))
    assert signature_differences(a, a) == ()
    found = signature_differences(a, b)
    assert found == (
        "the input is x: float32[1, 3] in A and x: float32[1, 4] in B",
        "only A has the input m: float32[1]",
        "only B has the output z: float32[1]",
    )


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (spec("x", 1, 3), spec("x", 1, 3), True),
        (spec("x", "N", 3), spec("x", 1, 3), True),
        (spec("x", 1, 3), spec("x", 1, 4), False),
        (spec("x", 1, 3), spec("x", 1), False),
        (spec("x", 1), spec("y", 1), False),
        (spec("x", 1), spec("x", 1, dtype=np.int64), False),
        (TensorSpec("x", F32, None), spec("x", 1), True),
    ],
)
def test_compares_inputs_of_signatures(left: TensorSpec, right: TensorSpec, same: bool) -> None:
    assert is_interchangeable(Signature((left,), ()), Signature((right,), ())) is same
