"""How large sums of two products become beside samples, channel by channel: what a range fitted to them has to bear."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeq.data.samples import Samples
from edgeq.emulate.saturation.audit import Simulation, model_macs, sample_count
from edgeq.model.saturation import pairs_vary
from edgeq.run.session import SessionSettings

_HELD = 2**15 - 1


def largest_sums(
    model: Path,
    settings: SessionSettings,
    samples: Samples,
    source: Callable[[str], str],
) -> dict[str, NDArray[np.float64]]:
    """Per output channel of each layer, by the name of its source node, the largest sum of two products beside the
    samples as a share of what 16 bits hold; 0 where none leaves them. Without layers whose kernels differ in what they
    pair, and without groups.

    Args:
        model: quantized with the full range of its weights.
        samples: 2 to 8 of them are run, fewer for larger models.
        source: name in the optimised graph → that of the source node.

    Raises:
        RuntimeUnavailableError: onnxruntime refuses the model.
    """
    simulation = Simulation(model, settings, saturating=False, watched=True)
    known = {
        layer.name: source(layer.name)
        for layer in simulation.layers
        if layer.rows is not None
        and not pairs_vary(layer.rows.shape[1], layer.channels)
        and layer.node.attributes.get_int("group", 1) == 1
    }
    found: dict[str, NDArray[np.float64]] = {}
    count = min(len(samples), sample_count(model_macs(simulation)))
    for sample in itertools.islice(samples, count):
        for name, computed in simulation.run(sample.inputs).layers.items():
            if name in known:
                reached = computed.stats.largest / _HELD
                found[known[name]] = np.maximum(found.get(known[name], 0.0), reached)
    return found
