from __future__ import annotations

import numpy as np

from edgeq.backends.systolic.emit_c.layout import c_axis, c_order, c_shape, is_identity, moved


def test_images_are_nhwc_and_the_rest_stays() -> None:
    x = np.arange(2 * 3 * 4).reshape(1, 2, 3, 4)
    assert c_shape(x.shape) == (3, 4, 2)
    assert np.array_equal(x.reshape(-1)[c_order(x.shape)].reshape(3, 4, 2), x[0].transpose(1, 2, 0))
    assert [c_axis(x.shape, axis) for axis in (1, 2, 3)] == [3, 1, 2]
    assert c_shape((1, 5)) == (5,)
    assert c_order((1, 2, 3)).tolist() == list(range(6))
    assert c_axis((1, 2, 3), 2) == 2


def test_a_move_between_orders() -> None:
    """A transpose to NHWC moves nothing if images are stored as NHWC. An index of -1 stays -1."""
    shape, turned = (1, 2, 3, 4), (1, 3, 4, 2)
    index = np.arange(24).reshape(shape).transpose(0, 2, 3, 1).ravel().astype(np.int32)
    values = np.arange(24)
    assert is_identity(moved(index, c_order(shape), values), 24)
    x = np.random.default_rng(0).integers(-9, 9, shape)
    stored = x.ravel()[c_order(shape)]
    turned_values = stored[moved(index, c_order(shape), c_order(turned))]
    assert np.array_equal(turned_values, x.transpose(0, 2, 3, 1).ravel()[c_order(turned)])
    assert moved(np.int32([-1, 1]), np.arange(2), np.arange(2)).tolist() == [-1, 1]
    assert not is_identity(np.arange(3, dtype=np.int32), 4)
