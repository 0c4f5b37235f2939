"""Correct layers one after the other, in the order of the graph: round weights again, and subtract the mean error.

Errors add up from layer to layer. So each layer of the quantized model gets the outputs of the corrected layers before
it, and is corrected for these inputs. Correcting all layers at once would repeat earlier corrections, and diverge.

- Weights. Rounding each weight to the nearest integer is best only if inputs are uncorrelated. With H, the covariance
  of the layer's inputs, `edgeq.quantization.gptq` rounds for the least error of the output. A layer without a bias
  cannot take up the mean error dW E[x], so H is then the second moment. The rounding of the input adds step^2 / 12 to
  the diagonal, because it is an independent error in each tap. Coarse scales are chosen anew (`scale_choice`).
- Bias. It takes up dW E[x]. Then the mean of the output after the next activation function becomes float32's
  (`output_means`; Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section
  4.2, with data instead of their assumptions).

At 8 bits, the biases matter most, so a layer with many taps keeps its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.calibration.sampled_values import spread
from edgeq.data.samples import Sample, Samples
from edgeq.model.graph import GraphIndex, name_of
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.gptq import damp, round_rows, squared_errors
from edgeq.quantization.params import weight_limits
from edgeq.scheme import Scheme
from edgeq.tuning.recover.base import Recovery, RecoveryState, Stage
from edgeq.tuning.recover.expansion import PLAIN, expand_integers
from edgeq.tuning.recover.followers import Followers
from edgeq.tuning.recover.layers import Floats, WeightedLayer, Weights, find_layers, input_channels
from edgeq.tuning.recover.output_means import OutputView, find_shift, measure_float_means
from edgeq.tuning.recover.patch_moments import PatchMoments, PatchSums
from edgeq.tuning.recover.quantized_file import IntegerLayer, QuantizedFile
from edgeq.tuning.recover.scale_choice import choose_scales
from edgeq.tuning.recover.stepper import Stepper
from edgeq.util.display import Progress
from edgeq.util.heap import return_freed_memory

_SAMPLES = (16, 32)
"""Smallest and largest number of samples, spread evenly over all samples."""
_MACS = 1_500_000_000
"""Multiply-accumulates over all samples. They choose between the two numbers above, so that small models, which cost
little, get more precise means.
"""
MEMORY = 2**29
"""Bytes that the activations of all samples may take at once. It limits the number of samples."""
LARGEST = 2**22
"""Limit of entries in a layer's second moment (groups x taps^2). Larger layers keep their weights, because the time to
round them grows with the cube of the taps.
"""
_MOST_BITS = 8
# Number of patches on which scales are compared.
_PATCHES = 2048
# Number of tensors of the largest size that are in memory at once, on both sides of a branch and of Q/DQ nodes.
_TENSORS_IN_MEMORY = 4


@dataclass(frozen=True)
class SequentialCorrection(Recovery):
    """Correct weights and biases in one pass. The nodes do not change."""

    name: str = "sequential-correction"
    title: str = "weights rounded for the least error of each layer's output, and its mean error subtracted"
    stage: Stage = "artifact"
    free: bool = True
    order = 70

    def apply(self, state: RecoveryState, samples: Samples, workdir: Path, progress: Progress) -> RecoveryState:
        """Correct the layers of `state`.

        Raises:
            EdgeqError: a model refuses a sample.
        """
        assert state.artifact is not None
        file = QuantizedFile.load(state.artifact.model, state.scheme)
        # A weight or bias that two layers share cannot be right for both.
        layers = file.integer_layers(find_layers(state.prepared.model))
        # Weights of 16 bits have no error that is worth a correction.
        integers = [i for i in layers if not i.has_other_readers and i.params.bits <= _MOST_BITS]
        if not integers:
            return state.note(f"{self.name}: no layer has integer weights of its own")
        macs = sum(node_macs(state.prepared.model).values())
        count = int(np.clip(_MACS // max(1, macs), *_SAMPLES))
        correction = LayerCorrection(state.prepared, file, state.scheme)
        correction.run(integers, list(spread(samples, count)), progress)
        # The activations of all samples were in memory, and the judging needs memory of other sizes.
        return_freed_memory()
        path = workdir / state.artifact.model.name
        file.save(path)
        return state.replace(artifact=replace(state.artifact, model=path)).note(
            f"{self.name}: the weights of {correction.rounded} and the means of {correction.shifted} of "
            f"{len(integers)} layers corrected"
        )


class LayerCorrection:
    """Correct the layers of one quantized file in memory.

    Args:
        prepared: the float model.
        file: the file to correct.

    Attributes:
        rounded, shifted: number of layers whose weights and whose biases changed.
    """

    def __init__(self, prepared: PreparedModel, file: QuantizedFile, scheme: Scheme) -> None:
        self._prepared = prepared
        self._file = file
        self._floats = Weights(prepared.model)
        self._limits = weight_limits(scheme.weight_type, scheme.reduce_range)
        self._scheme, self._coarse = scheme, scheme.scale == "power-of-two" or not scheme.per_channel
        self._followers, self._layers = Followers(prepared.model), find_layers(prepared.model)
        # The sums of neighbouring weights were fitted to a limit, and another rounding could exceed it.
        self._rounds = not scheme.fit_pairs
        self.rounded = self.shifted = 0

    def run(self, integers: Sequence[IntegerLayer], samples: Sequence[Sample], progress: Progress) -> None:
        """Correct `integers` in the order of the graph.

        Args:
            samples: calibration samples; `MEMORY` limits how many are used.

        Raises:
            EdgeqError: a model refuses a sample.
        """
        order = GraphIndex(self._file.model).order
        integers = sorted(integers, key=lambda integer: order[integer.node.name or ""])
        views = self._views(integers)
        targets, largest = measure_float_means(self._prepared, views, samples)
        # Large activations leave room for fewer samples, but one is always used.
        count = int(np.clip(MEMORY // (_TENSORS_IN_MEMORY * largest), 1, len(samples)))
        model = expand_integers(self._file.model)
        tensors, initializers = GraphIndex(model).values, model.graph.initializers
        steps = Stepper(model, [sample.inputs for sample in samples[:count]])
        with progress.stage("correcting layers", len(integers)) as advance:
            for integer in integers:
                layer, output = integer.layer, name_of(integer.node.outputs[0])
                tensor = output + PLAIN if output + PLAIN in tensors else output
                node = tensors[tensor].producer()
                assert node is not None
                rounds = self._rounds and layer.groups * layer.taps**2 <= LARGEST
                inputs = steps.advance(name_of(node.inputs[0]))
                patches = sum_patches(layer, inputs, products=rounds)
                if rounds and self._coarse and integer.scales and not integer.params.zero_point.any():
                    integer = self._choose_scales(integer, patches.moments(), inputs, views[layer.name])
                elif rounds:
                    self._round(integer, patches.moments())
                self._start_bias(integer, patches.mean())
                # The stepper runs a copy of the file's graph.
                for value in (integer.weight, integer.bias, *integer.scales):
                    if value is not None:
                        initializers[name_of(value)].const_value = value.const_value
                values = steps.advance(tensor)
                if integer.bias is not None:
                    shift = find_shift(views[layer.name], targets[layer.name][:count], values)
                    added = self._file.add_to_bias(integer, shift)
                    shape = [1, -1] + [1] * (len(layer.shape) - 2) if layer.op_type == "Conv" else [-1]
                    steps.add(tensor, added.astype(np.float32).reshape(shape))
                    self.shifted += bool(np.any(added))
                advance(1)

    def _views(self, integers: Sequence[IntegerLayer]) -> Mapping[str, OutputView]:
        followers = self._followers
        return {
            i.layer.name: OutputView(
                i.layer,
                followers.function(followers.find(i.layer.output), np.float32),
                self._file.output_range(i),
            )
            for i in integers
        }

    def _round(self, integer: IntegerLayer, moments: PatchMoments) -> None:
        """Round the weights of a layer again. Each output keeps its weights unless the expected error falls."""
        rows = self._floats.rows(integer.layer)
        old = self._file.weight(integer)
        new = round_layer(rows, old, integer, moments, self._limits)
        if np.any(new != old):
            self._file.set_weight(integer, new)
            self.rounded += 1

    def _choose_scales(
        self, integer: IntegerLayer, moments: PatchMoments, inputs: Sequence[NDArray[Any]], view: OutputView
    ) -> IntegerLayer:
        """Choose the scales of a layer's weights and round them. Return the layer with its scales."""
        layer = integer.layer
        rows, old = self._floats.rows(layer), self._file.weight(integer)
        choice = choose_scales(
            integer,
            rows,
            self._floats.array(layer.bias).ravel() * np.ones(layer.outputs) if layer.bias else np.zeros(layer.outputs),
            np.concatenate(list(draw_patches(layer, inputs)), axis=1),
            _metric(integer, moments),
            view,
            scheme=self._scheme,
            importance=self._importance(layer),
        )
        changed = np.any(choice.scale != integer.params.scale) or np.any(choice.integers != old)
        integer = self._file.set_scale(integer, choice.scale)
        self._file.set_weight(integer, choice.integers)
        self.rounded += bool(changed)
        return integer

    def _importance(self, layer: WeightedLayer) -> Floats:
        """Return how much an error of each output counts, float64 [outputs]: as much as the layers behind amplify it.
        If other nodes read the output, all count alike.
        """
        ends = self._followers.find(layer.output).ends
        behind = [other for other in self._layers if other.source in ends]
        if not behind or any(input_channels(other) != layer.outputs for other in behind):
            return np.ones(layer.outputs)
        return np.asarray(sum(self._floats.input_importance(other) for other in behind), np.float64)

    def _start_bias(self, integer: IntegerLayer, mean: Floats) -> None:
        """Set the bias to float32's, plus the mean error of the weights on inputs with this mean.

        Newton's step starts here. It moves no channel that is nearly always cut off by the activation function, and it
        is shrunk, so it alone would leave a part of this error. The file's bias decides nothing, so a second pass
        changes nothing.
        """
        if integer.bias is None:
            return
        errors = self._floats.rows(integer.layer) - integer.per_row(integer.params.scale) * self._file.weight(integer)
        bias = integer.layer.bias
        target: Floats | float = self._floats.array(bias).ravel() if bias else 0.0
        start = target + (errors * mean[:, None, :]).sum(2).ravel()
        self._file.add_to_bias(integer, start - self._file.bias(integer))


def sum_patches(layer: WeightedLayer, inputs: Sequence[NDArray[Any]], *, products: bool = True) -> PatchSums:
    """Return sums over patches that a layer reads from its input, given for each sample. About four patches for each
    tap are drawn at random, with a fixed seed.

    Args:
        products: see `PatchSums`.
    """
    sums = PatchSums(layer, products=products)
    for number, values in enumerate(inputs):
        sums.add(values, len(inputs), np.random.default_rng([number, layer.taps]))
    return sums


def draw_patches(layer: WeightedLayer, inputs: Sequence[NDArray[Any]]) -> Iterator[NDArray[np.float32]]:
    """Yield patches that a layer reads in each sample, float32 [groups, positions, taps]: at most `_PATCHES` of all
    samples, drawn at random with a fixed seed.
    """
    for number, values in enumerate(inputs):
        yield layer.patches(values, -(-_PATCHES // len(inputs)), np.random.default_rng([number, layer.taps]))


def round_layer(
    rows: Floats, old: NDArray[np.int64], integer: IntegerLayer, moments: PatchMoments, limits: tuple[int, int]
) -> NDArray[np.int64]:
    """Return integer weights minus their zero points, int64 [groups, outputs per group, taps].

    Args:
        rows: the float weights, float64 [groups, outputs per group, taps].
        old: the weights so far, of the same form as the result.
        limits: smallest and largest integer of the weight type, before the zero point is subtracted.
    """
    scale = integer.per_row(integer.params.scale)
    zero = integer.per_row(integer.params.zero_point)
    metric = _metric(integer, moments)
    new = round_rows(rows / scale, metric, limits[0] - zero, limits[1] - zero)
    old_error, new_error = (squared_errors(rows - scale * q, metric) for q in (old, new))
    return np.asarray(np.where((new_error < old_error)[:, :, None], new, old), np.int64)


def _metric(integer: IntegerLayer, moments: PatchMoments) -> Floats:
    """Return the matrix that weighs errors of the weights, float64 [groups, taps, taps]."""
    return damp(moments.second if integer.bias is None else moments.covariance, integer.input_scale)


RECOVERY = SequentialCorrection()
