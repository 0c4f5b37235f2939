"""Rank the layers, tensors or products of a candidate in the order in which to give them more precision. The method
depends on the candidate.

The noise of a tensor or product is the noise at the outputs if nothing else is rounded, as gradients of the float
model predict it (`edgeq.measure.sensitivity`). A simulator of the hardware would take a thousand times as long.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import EVERYTHING, Basis
from numpy.typing import NDArray

from edgeq.backends.base import backend_named
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import EdgeqError, one_line
from edgeq.hardware.target import Target
from edgeq.measure.sensitivity import rank_noise
from edgeq.model.graph import GraphIndex, channel_axis, constant_values, is_op, name_of, only_reader, sizes
from edgeq.model.int8_rules import int8_rules, quantizable_operators
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.model.quant_params import Grid
from edgeq.prove.job import Built, Job
from edgeq.quantization.block_products import block_products, read_blocks
from edgeq.quantization.params import weight_params
from edgeq.run.session import Engines
from edgeq.scheme import Scheme
from edgeq.tuning.accuracy import AccuracyMeter
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.candidate_builder import CandidateBuilder
from edgeq.tuning.float_layers import WIDE, LayerRanking, MacCosts, RankedLayer, rank_by_probing
from edgeq.tuning.recover.layers import find_layers
from edgeq.tuning.recover.static_ranking import rank_static
from edgeq.tuning.sessions import model_to_judge, open_once
from edgeq.tuning.space import Candidate
from edgeq.util.display import Progress

SCREENED = 8
"""Number of samples on which candidates are screened and noise is measured."""
# A value before one of these is quantized with the range of the clipped result.
_CLIPPING = ("Relu", "Clip")


@dataclass(frozen=True)
class LayerRanker:
    """Rank the layers, tensors or products that a candidate quantizes.

    Attributes:
        workdir: folder for temporary builds that measure noise.
        counts: whether speed is counted, because the target's kernels do not run here.
        by_tensors: whether static candidates are ranked by tensors even if speed is counted. This is quicker but
            rougher.
        profiled: whether this machine's profile gives the costs of tensors.
    """

    job: Job
    target: Target
    workdir: Path
    counts: bool
    accuracy: AccuracyMeter
    builder: CandidateBuilder
    engines: Engines
    progress: Progress
    by_tensors: bool = False
    profiled: bool = True

    def rank(self, candidate: Candidate, built: Built, *, headroom: float, seconds: float) -> LayerRanking:
        """See `Evaluator.rank`. Static candidates are ranked by tensors and the runtime's profile. Other candidates are
        ranked by probing: one group of layers alone is quantized at a time, or a single layer if speed is counted.
        `built` is the build of `candidate`.
        """
        scheme, recoverer = candidate.scheme, self.builder.recoverer
        by_tensors = not self.counts or (self.by_tensors and WIDE not in self.target.profile.search)
        if by_tensors and scheme.mode == "static" and not candidate.builder and self.job.calibration:
            try:
                return rank_static(
                    recoverer,
                    self.job,
                    scheme,
                    candidate.recoveries,
                    profiled=candidate.engine is None,
                    timed=self.profiled,
                    progress=self.progress,
                )
            # The batch or the names may differ, because not every target's model has the same tensors.
            except EdgeqError as error:
                self.progress.note(f"layers are ranked by building, not by tensors: {one_line(error, most=200)}")

        model, samples, basis = self.job.prepared.model, self.accuracy.samples, self.job.basis
        if scheme.mode == "weight-only" and scheme.weight_bits < 8:
            with self.progress.stage("ranking products"):
                return rank_products(model, read_model(built.artifact.model), samples, basis)
        if WIDE in self.target.profile.search:
            if candidate.recoveries:
                model = recoverer.ranged(scheme, candidate.recoveries).prepared.model
            with self.progress.stage("ranking tensors"):
                widens_weights = backend_named(self.target.backend).widens_weights
                errors = _weight_errors(model, scheme) if widens_weights else {}
                return rank_tensors(model, built.ranges, samples, basis, weights=errors)
        macs = self._quantized_macs(candidate, built)
        # One layer leaves no choice, and if even the cheapest layer costs too much, no measurement helps.
        if len(macs) < 2 or min(macs.values()) > headroom * sum(macs.values()):
            return LayerRanking((), MacCosts({}))
        with self.progress.stage("ranking layers") as advance:

            def noise(nodes: Sequence[str]) -> float:
                advance(1)
                return self._noise_alone(candidate, nodes, macs)

            return rank_by_probing(macs, noise, BudgetClock(seconds).passed, singly=self.counts and not self.by_tensors)

    def _quantized_macs(self, candidate: Candidate, built: Built) -> dict[str, int]:
        """Return, in execution order, the multiply-accumulates of the int8 layers that may be kept in float."""
        coverage, scheme, model = built.artifact.coverage, candidate.scheme, self.job.prepared.model
        if coverage is not None:
            return {node.source: node.macs for node in coverage.nodes if node.kind == "int8" and node.macs}
        if scheme.mode == "dynamic":
            types = frozenset(scheme.dynamic_weight_types)
        else:
            types = frozenset(scheme.op_types or quantizable_operators(int8_rules(self.target.backend)))
        macs = node_macs(model)
        eligible = [n.name or "" for n in model.graph if n.op_type in types and n.name not in scheme.exclude]
        return {name: macs[name] for name in eligible if macs.get(name)}

    def _noise_alone(self, candidate: Candidate, nodes: Sequence[str], macs: Mapping[str, int]) -> float:
        """Quantize only `nodes` of the layers in `macs`, and return the noise power over the signal power at the
        outputs.
        """
        float_names = [name for name in macs if name not in nodes]
        scheme = candidate.scheme.replace(exclude=(*candidate.scheme.exclude, *float_names))
        # Recoveries take time, and they change the noise of all layers by about the same factor.
        probe = candidate.replace(name=f"{candidate.name}, only {nodes[0]}", scheme=scheme, recoveries=())
        with tempfile.TemporaryDirectory(dir=self.workdir) as folder:
            artifact = self.builder.build(probe, Path(folder) / "model.onnx").artifact
            with open_once(self.engines, *model_to_judge(artifact)) as session:
                return self.accuracy.measure_noise(session, SCREENED, model=probe.name)


def rank_products(model: ir.Model, quantized: ir.Model, samples: Samples, basis: Basis = EVERYTHING) -> LayerRanking:
    """Rank the products of a 4-bit model in the order in which to give them 8 bits.

    Args:
        model: the prepared float model.
        quantized: the same model with its products in blocks of 4 bits.
        samples: samples to take a few of.
        basis: what counts at the outputs.
    """
    products = block_products(quantized)
    weights: dict[str, NDArray[np.float32]] = {}
    outputs: dict[str, str] = {}
    costs: dict[str, int] = {}
    for layer in find_layers(model):
        if layer.name not in products:
            continue
        blocks = read_blocks(products[layer.name])
        # A product that has 8 bits already cannot get more.
        if blocks.bits == 8:
            continue
        exact = constant_values(model.graph.initializers[layer.weight])
        weights[layer.weight] = layer.unrows(blocks.matrix().T) - exact
        outputs[layer.name] = layer.output
        costs[layer.name] = blocks.integers.size // 2
    noises = rank_noise(GraphIndex(model), {}, samples, weights=weights, basis=basis) if weights else {}
    layers = [
        RankedLayer(name, (name,), noises[output].weights if output in noises else 0.0)
        for name, output in outputs.items()
    ]
    return _rank_by_worth(layers, costs, "eight_bit")


def rank_tensors(
    model: ir.Model,
    ranges: Mapping[str, Range],
    samples: Samples,
    basis: Basis = EVERYTHING,
    *,
    weights: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> LayerRanking:
    """Rank nodes by which output to raise to 16 bits first, for hardware that computes in 8 or 16 bits.

    Args:
        model: the prepared float model.
        ranges: ranges of its quantized tensors.
        samples, basis: see `rank_products`.
        weights: name of a weight that is raised with its layer's output → its error in 8 bits.
    """
    grid = Grid(ir.DataType.UINT8, symmetric=False)
    makers = {
        name_of(node.outputs[0]): node
        for node in model.graph
        if name_of(node.outputs[0]) in ranges
        and node.outputs[0].dtype in (None, ir.DataType.FLOAT)
        and not _is_clipped(node.outputs[0])
    }
    forms = {tensor: [grid.params(ranges[tensor].low, ranges[tensor].high)] for tensor in makers}
    noises = rank_noise(GraphIndex(model), forms, samples, weights=weights, basis=basis)
    of_weights = {layer.output: layer.weight for layer in find_layers(model) if layer.weight in weights}
    layers: list[RankedLayer] = []
    costs: dict[str, int] = {}
    for tensor, node in makers.items():
        name = str(node.name)
        costs[name] = prod(sizes(node.outputs[0]) or (1,))
        source = node.inputs[0] if is_op(node, *_CLIPPING) and node.inputs else None
        maker = source.producer() if source is not None and _is_clipped(source) else None
        noise = noises[tensor].forms[0] if tensor in noises else 0.0
        computed = tensor if maker is None else name_of(maker.outputs[0])
        if computed in of_weights:
            costs[name] += weights[of_weights[computed]].size
            noise += noises[computed].weights if computed in noises else 0.0
        layers.append(RankedLayer(name, (name,) if maker is None else (str(maker.name), name), noise))
    return _rank_by_worth(layers, costs, WIDE)


def _weight_errors(model: ir.Model, scheme: Scheme) -> dict[str, NDArray[np.float32]]:
    """Return the errors of the weights of a model's layers, rounded to the nearest integers of a scheme."""
    nodes = {node.name: node for node in model.graph}
    errors = {}
    for layer in find_layers(model):
        exact = constant_values(model.graph.initializers[layer.weight])
        axis = channel_axis(nodes[layer.name]) % exact.ndim if scheme.per_channel else None
        errors[layer.weight] = weight_params(exact, axis, scheme).fake_quant(exact) - exact
    return errors


def _rank_by_worth(
    layers: list[RankedLayer], costs: Mapping[str, int], field: Literal["wide", "eight_bit"]
) -> LayerRanking:
    """Rank by noise per byte, the highest first. `costs` are bytes by name."""
    order = sorted(layers, key=lambda layer: (-layer.noise / max(1, costs[layer.name]), layer.name))
    return LayerRanking(tuple(order), MacCosts(costs), field=field)


def _is_clipped(value: ir.Value) -> bool:
    """Return whether the only reader of a value clips it. If so, the value is quantized with the range of the clipped
    result.
    """
    reader = only_reader(value)
    return reader is not None and is_op(reader, *_CLIPPING)
