from __future__ import annotations

import numpy as np

from edgeq.backends.systolic.estimate import BYTES_PER_CYCLE, estimate
from edgeq.backends.systolic.program import ArrayConfig, product_tiles
from edgeq.util.records import plain
from tests.backends.systolic.graphs import GraphBuilder, program_of


def test_tiles_fit_into_the_memories() -> None:
    array = ArrayConfig()
    for rows, columns, depth in ((64, 64, 64), (10000, 64, 576), (1, 1000, 1024), (5000, 5000, 5000)):
        tiles = product_tiles(rows, columns, depth, array)
        # A tile may use half of each memory: 8192 and 512 rows.
        assert (tiles.i + tiles.j) * tiles.k * 16 <= 8192
        assert tiles.i * tiles.j * 16 <= 512
        assert min(tiles.i, tiles.j, tiles.k) >= 1
        assert tiles.i * 16 < rows + 16


def test_small_products_are_one_piece() -> None:
    tiles = product_tiles(64, 32, 48, ArrayConfig())
    assert (tiles.i, tiles.j, tiles.k) == (4, 2, 3)


def test_formulas() -> None:
    b = GraphBuilder(np.random.default_rng(0), input_shape=(1, 16, 8, 8))
    first = b.conv("input", 32, (1, 1), pads=(0, 0, 0, 0))
    model, samples = b.model(b.conv(first, 32, groups=32)), b.samples()
    found = estimate(program_of(model, samples, ArrayConfig()))
    dense, depthwise = found.layers
    assert dense.macs == 64 * 32 * 16
    assert dense.compute_cycles == 4 * 2 * 1 * 16
    assert dense.traffic == 64 * 16 + 16 * 32 + 4 * 32 + 64 * 32
    assert dense.cycles == max(dense.compute_cycles, -(-dense.traffic // BYTES_PER_CYCLE))
    assert dense.utilisation == dense.macs / (dense.cycles * 256)
    # It uses one of sixteen columns and nine of sixteen rows.
    assert depthwise.utilisation <= 9 / 256
    assert plain(found)["estimate"] is True
    assert found.cycles == dense.cycles + depthwise.cycles
