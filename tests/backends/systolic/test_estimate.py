from __future__ import annotations

import numpy as np

from edgeq.backends.systolic.array import ArrayConfig
from edgeq.backends.systolic.estimate import BYTES_PER_CYCLE, estimate
from edgeq.util.records import plain
from tests.backends.systolic.graphs import GraphBuilder, program_of


def test_formulas() -> None:
    b = GraphBuilder(np.random.default_rng(0), input_shape=(1, 16, 8, 8))
    tensor = b.conv("input", 32, (1, 1), pads=(0, 0, 0, 0))
    model, samples = b.model(b.conv(tensor, 32, groups=32)), b.samples()
    figures = estimate(program_of(model, samples, ArrayConfig()))
    dense, depthwise = figures.layers
    assert dense.macs == 64 * 32 * 16
    assert dense.compute_cycles == 4 * 2 * 1 * 16
    assert dense.traffic == 64 * 16 + 16 * 32 + 4 * 32 + 64 * 32
    assert dense.cycles == max(dense.compute_cycles, -(-dense.traffic // BYTES_PER_CYCLE))
    assert dense.utilisation == dense.macs / (dense.cycles * 256)
    # It uses one of sixteen columns and nine of sixteen rows.
    assert depthwise.utilisation <= 9 / 256
    assert plain(figures)["estimate"] is True
    assert figures.cycles == dense.cycles + depthwise.cycles
