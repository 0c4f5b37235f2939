"""Choose the tensors whose values a file states, so that the chip checks itself, and compare chip and model.

The runtime's test runs one input and compares each tensor that the file names. The first that differs names the layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.espdl.chips import EspFamily
from edgeq.backends.espdl.interpret import run
from edgeq.backends.espdl.network import EspGraph, EspTensor
from edgeq.backends.espdl.session import EspSession, encode
from edgeq.data.sample import Sample
from edgeq.data.samples import Samples
from edgeq.errors import CheckFailedError, DataError
from edgeq.measure.inference import infer
from edgeq.measure.paired import measure_paired_losses
from edgeq.run.session import SessionSettings, open_session

_MOST_INNER, _LEAST_INNER = 8, 3
# Test values take flash, so the largest tensors are left out as long as enough others remain.
_FLASH_BYTES, _FLASH_SHARE = 1 << 15, 0.25
_COMPARED = 8
# Softmax depends on the C library's exponential.
_EXPONENTIAL = 1e-5
_WORSE_DB = 20.0
"""Above this SQNR against the Q/DQ model, a difference is one of roundings."""


def first_rows(samples: Samples, count: int) -> list[Sample]:
    """Return the first samples at batch size 1.

    Raises:
        DataError: there is no sample.
    """
    first = list(itertools.islice(samples, count))
    if not first:
        raise DataError(f"{samples.source} has no samples", "Give at least one")
    return [
        Sample(sample.name, {name: np.asarray(value)[:1] for name, value in sample.inputs.items()}) for sample in first
    ]


def encoded_inputs(graph: EspGraph, family: EspFamily, sample: Sample) -> dict[str, NDArray[Any]]:
    """Return the integers of a graph's inputs for one sample, by the name of their tensor."""
    return {
        port.tensor.name: encode(np.asarray(sample.inputs[port.name]), port.tensor, port.order, family.arithmetic)
        for port in graph.inputs
    }


def checked_values(graph: EspGraph, family: EspFamily, sample: Sample) -> dict[EspTensor, NDArray[Any]]:
    """Return the values of the inputs, the outputs and three to eight inner tensors for one sample."""
    values = run(graph, encoded_inputs(graph, family, sample), family.arithmetic)
    chosen = (*(port.tensor for port in graph.inputs), *inner_tensors(graph), *(port.tensor for port in graph.outputs))
    return {tensor: values[tensor] for tensor in chosen}


def inner_tensors(graph: EspGraph) -> tuple[EspTensor, ...]:
    """Return three to eight inner tensors, spread over the nodes and small if possible."""
    ends = {port.tensor for port in (*graph.inputs, *graph.outputs)}
    inner = [tensor for node in graph.nodes for tensor in node.outputs if tensor not in ends]
    weights = sum(tensor.bytes for tensor in graph.tensors() if tensor.values is not None)
    limit = max(_FLASH_BYTES, _FLASH_SHARE * weights)
    places = np.linspace(0, len(inner) - 1, min(_MOST_INNER, len(inner))).round().astype(int)
    spread = [inner[place] for place in places]
    while len(spread) > _LEAST_INNER and sum(tensor.bytes for tensor in spread) > limit:
        spread.remove(max(spread, key=lambda tensor: tensor.bytes))
    return tuple(spread)


@dataclass(frozen=True)
class ChipAgreement:
    """Describe how close the chip's answers and those of the Q/DQ model in onnxruntime are to the float model's.

    Attributes:
        chip_db, model_db: SQNR against the float model over all outputs, in dB.
    """

    equal: bool
    chip_db: float
    model_db: float
    samples: int

    @property
    def sentence(self) -> str:
        """Return one sentence."""
        count = f"{self.samples} sample{'s' * (self.samples != 1)}"
        if self.equal:
            return f"the chip's values equal those of the Q/DQ model in onnxruntime on {count}"
        return (
            f"in the chip's integers the SQNR is {self.chip_db:.1f} dB on {count}, and {self.model_db:.1f} dB in "
            "onnxruntime, which rounds half to even"
        )


def compare_chip(
    graph: EspGraph, family: EspFamily, model: Path, exact: Path, samples: Samples, options: Mapping[str, str]
) -> ChipAgreement:
    """Compare the chip's integers with the Q/DQ model.

    Args:
        model, exact: the Q/DQ model and the float model.
        options: session options with which onnxruntime rounds at each Q/DQ pair.

    Raises:
        CheckFailedError: the chip's answers are certainly further from the float model's, beyond roundings.
    """
    rows = first_rows(samples, _COMPARED)
    sessions = [EspSession(graph, family), open_session(model, SessionSettings(config=options)), open_session(exact)]
    chip, expected, right = ([infer(session, row) for row in rows] for session in sessions)
    losses = [x for x in measure_paired_losses(right, expected, chip) if x.level_db < _WORSE_DB and x.proven]
    if losses:
        raise CheckFailedError(
            f"{model.name}: the chip's answers differ from those of the Q/DQ model ({losses[0].level_db:.1f} dB SQNR): "
            f"{losses[0].sentence}",
            "Sums may leave the accumulators: recover the model with `edgeq tune`, or choose another chip",
        )
    flat = [np.concatenate([row[name].ravel() for row in rows_ for name in row]) for rows_ in (right, expected, chip)]
    equal = bool(np.allclose(flat[2], flat[1], rtol=_EXPONENTIAL, atol=_EXPONENTIAL))
    return ChipAgreement(equal, _sqnr_db(flat[0], flat[2]), _sqnr_db(flat[0], flat[1]), len(rows))


def _sqnr_db(exact: NDArray[Any], answer: NDArray[Any]) -> float:
    exact, answer = exact.astype(np.float64), answer.astype(np.float64)
    noise, signal = float(np.square(exact - answer).sum()), float(np.square(exact).sum())
    return math.inf if noise == 0 else 10 * math.log10(max(signal, np.finfo(np.float64).tiny) / noise)
