"""Predict the noise that errors of inner tensors cause at the outputs, from one float pass and a few gradients.

For a small error e_t of tensor t, the outputs change by J_t e_t. With random signs v at the outputs and the gradient
g_t = J_t' v, the expectation of (g_t . e_t)^2 is the power of that change (Hutchinson, 1990):

    noise_t = (1/K) sum_k sum_c (g_t^k . e_t)_c^2        v scaled so that the power of each part of the outputs is 1

The sum over channels c takes the errors of different channels as independent (`change_power`). So the gradients of a
few directions price every error of every tensor, and nothing runs again. The prediction is linear: above about a tenth
of the signal's power, real errors saturate and the prediction is too large, which does not change the order.

A part is an output, or the slices of an output whose values have one unit (`edgeq.measure.slices`), so that boxes and
scores have the same weight. Elements that the basis does not count have no weight. Where the gradients end
(`edgeq.model.backward`), the tensor counts as one more output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import numpy as np
import onnx_ir as ir
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.measure.pairs import find_visible
from numpy.typing import NDArray

from edgeq.data.samples import Sample, Samples, spread_over
from edgeq.errors import DataError
from edgeq.measure.inference import run_feed
from edgeq.measure.slices import judged_axes, like_slices
from edgeq.model.backward import Backward, Tensors, build_backward
from edgeq.model.graph import GraphIndex, is_op, name_of
from edgeq.model.quant_params import QuantParams
from edgeq.model.sessions import Loadable, open_in_memory
from edgeq.run.session import SessionSettings
from edgeq.util.display import SILENT, Progress
from edgeq.util.heap import return_freed_memory

SAMPLES = 2
"""Number of samples whose gradients are computed."""
PROBES = 2
"""Number of directions for each sample."""
Place = tuple[str, bool]
"""A tensor, and whether only its readers apart from the others count (`edgeq.model.backward`)."""
Gradients = Mapping[Place, NDArray[np.float32]]


class ProbeOptions(TypedDict, total=False):
    """Hold the options of `follow_gradients`."""

    basis: Basis
    apart: Collection[tuple[str, str]]
    count: int
    probes: int
    seed: int
    settings: SessionSettings | None
    progress: Progress


@dataclass(frozen=True)
class SampleGradients:
    """Hold the float model's tensors for one sample, and compute gradients at the outputs.

    Attributes:
        sample: the sample.
        values: its inputs and all tensors of the main graph, by name.
        places: the tensors that have gradients.
    """

    sample: Sample
    values: Tensors
    places: tuple[Place, ...]
    _run: Callable[[Collection[str] | None], Iterator[Gradients]]

    def probe(self, tensors: Collection[str] | None = None) -> Iterator[Gradients]:
        """Yield the gradients of each direction. The sum of `change_power` over all directions and samples is the
        noise of an error. Each call has the same directions.

        Args:
            tensors: the tensors whose gradients are returned; None for all. Gradients are as large as their tensors.
        """
        return self._run(tensors)


def follow_gradients(
    graph: GraphIndex,
    tensors: Collection[str],
    samples: Samples,
    *,
    basis: Basis = EVERYTHING,
    apart: Collection[tuple[str, str]] = (),
    count: int = SAMPLES,
    probes: int = PROBES,
    seed: int = 0,
    settings: SessionSettings | None = None,
    progress: Progress = SILENT,
) -> Iterator[SampleGradients]:
    """Yield the gradients of some samples, one sample at a time. Only one sample's tensors are in memory.

    Args:
        graph: the float model.
        tensors: names of the tensors that get gradients.
        basis: which elements of the outputs count.
        apart: (tensor, node) pairs of readers with a gradient of their own, see `build_backward`.
        count: number of samples, evenly spread.
        probes: number of directions for each sample.
        settings: threads, providers and configuration of the sessions.

    Raises:
        DataError: there are no samples, or the model refuses one.
    """
    chosen = list(spread_over(samples, count))
    if not chosen:
        raise DataError(f"{samples.source}: no samples to follow errors on", "Point ⟨data⟩ at samples")
    # Without an arena: for a few runs that return most tensors, it would keep several times their size.
    settings = replace(settings or SessionSettings(), arena=False)
    forward = _Forward(graph, settings)
    sessions: _GradientSessions | None = None
    weights: list[dict[str, NDArray[np.float32]]] = []
    with progress.stage("Following errors to the outputs", len(chosen)) as advance:
        for place, sample in enumerate(chosen):
            values = forward.run(sample)
            if sessions is None or not sessions.backward.serves(values):
                sessions = _GradientSessions(build_backward(graph, tensors, values, apart), settings)
                names = tuple(sessions.backward.directions)
                runs = [values if k == place else forward.run(s, names) for k, s in enumerate(chosen)]
                weights = _weigh(names, runs, chosen, basis, probes)
                del runs
            run = _Probes(sessions, values, weights[place], probes, (seed, place))
            yield SampleGradients(sample, values, tuple(sessions.backward.gradients), run)
            # The tensors of the next sample need this memory.
            del values, run
            return_freed_memory()
            advance(1)


def change_power(slopes: Sequence[NDArray[np.float32]], errors: Sequence[NDArray[Any]]) -> float:
    """Return the power of the change that errors cause along one direction.

    Errors of different channels count as independent, so their changes are squared one by one. Within a channel they
    add up first, because a coarse step or a changed weight moves all its positions alike. With a single square, the sum
    over the directions would spread by sqrt(2 / directions); with a square for each element, errors that agree would
    count as chance.

    Args:
        slopes, errors: gradients and errors of one tensor, in its shape; several if its readers get unlike errors.
    """
    changes = sum(_channel_sums(slope, error) for slope, error in zip(slopes, errors, strict=True))
    return float(np.square(changes).sum())


def _channel_sums(slope: NDArray[np.float32], error: NDArray[Any]) -> NDArray[np.float32]:
    # An image has its channels at axis 1. Rows of features have them at the end. einsum starts no threads of BLAS.
    if slope.ndim == 4:
        return np.asarray(np.einsum("bchw,bchw->c", slope, error, optimize=False))
    width = slope.shape[-1] if slope.ndim else 1
    return np.asarray(np.einsum("rc,rc->c", slope.reshape(-1, width), error.reshape(-1, width), optimize=False))


@dataclass(frozen=True)
class TensorNoise:
    """Hold the noise that one tensor causes at the outputs: noise power divided by signal power, averaged over the
    parts of the outputs. Noises of tensors add up. A tensor that stays in float causes none.

    Attributes:
        forms: noise of the rounding to each form that was asked for.
        weights: noise of the errors of the weights of the layer that computes the tensor.
    """

    forms: tuple[float, ...]
    weights: float = 0.0


def rank_noise(
    graph: GraphIndex,
    forms: Mapping[str, Sequence[QuantParams]],
    samples: Samples,
    *,
    weights: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    **options: Unpack[ProbeOptions],
) -> dict[str, TensorNoise]:
    """Predict the noise at the outputs of each rounding of each tensor, and of the errors of weights.

    Nothing is built. One float run and a few gradients for each sample price every form: 8 bits in one range or in
    another, 16 bits, scales per channel. The cost is that of about 4 float runs for each direction, and a pass over the
    elements for each form.

    Args:
        graph: the float model, prepared.
        forms: tensor → the scales and zero points to price, for example `Grid.params` of its range.
        samples: samples to take a few of.
        weights: name of a weight → its error, the quantized weight minus the float one, in its shape. Only weights that
            are constants of Conv, ConvTranspose, Gemm and MatMul count.
        options: see `follow_gradients`.

    Returns:
        Tensor → its noises, the noisiest first by the first form and the weights. The tensors that the layers of
            `weights` compute are among them. Tensors on which no output depends are left out.

    Raises:
        DataError: there are no samples, or the model refuses one.
    """
    layers = _weight_layers(graph, weights)
    session = open_in_memory(layers, options.get("settings")) if layers is not None else None
    computed = [name_of(v).removesuffix(_CHANGE) for v in layers.graph.outputs] if layers is not None else []
    entries = [name_of(value) for value in layers.graph.inputs] if layers is not None else []
    tensors = {**dict.fromkeys(forms), **dict.fromkeys(computed)}
    rounded = {name: np.zeros(len(forms.get(name, ()))) for name in tensors}
    of_weights, names = dict.fromkeys(tensors, 0.0), set()
    for gradients in follow_gradients(graph, tensors, samples, **options):
        feed = {name: np.asarray(gradients.values[name], np.float32) for name in entries}
        sample_name = gradients.sample.name
        results = run_feed(session, None, feed, sample_name, model="a layer") if session is not None else ()
        errors = dict(zip(computed, results, strict=True))
        for slopes in gradients.probe():
            for (name, is_apart), slope in slopes.items():
                names.add(name)
                values = np.asarray(gradients.values[name], np.float32)
                # The errors are computed again for each direction, because to keep them takes more memory than time.
                for place, params in enumerate(() if is_apart else forms.get(name, ())):
                    rounded[name][place] += change_power([slope], [rounding_error(params, values)])
                if name in errors:
                    of_weights[name] += change_power([slope], [errors[name]])
    noises = {name: TensorNoise(tuple(rounded[name].tolist()), of_weights[name]) for name in tensors if name in names}
    return dict(sorted(noises.items(), key=lambda item: -sum(item[1].forms[:1]) - item[1].weights))


def rounding_error(params: QuantParams, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what rounding changes in a tensor of any shape, float32. Elements that are not finite have no error."""
    scale, zero_point = params.spread(values.shape)
    steps = np.asarray(scale, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        error = values / steps
        np.rint(error, out=error)
        np.clip(error, np.float32(params.low - zero_point), np.float32(params.high - zero_point), out=error)
        error *= steps
        error -= values
    return _finite(error)


_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_CHANGE = "/change"
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def _weight_layers(graph: GraphIndex, weights: Mapping[str, NDArray[Any]]) -> ir.Model | None:
    """Return a model of the linear layers alone, with the errors of their weights in place of the weights and without
    biases. So it computes what the errors of the weights change. Its inputs are called as the tensors of the float
    model, and its outputs as these with `_CHANGE`. Return None if no layer reads a weight.
    """
    part = ir.Graph([], [], nodes=[], opset_imports=dict(graph.graph.opset_imports), name="weights")
    entries: dict[str, ir.Value] = {}
    constants: dict[str, ir.Value] = {}
    for node in graph.graph:
        operands = node.inputs[:2]
        if not is_op(node, *_LINEAR) or sum(name_of(value) in weights for value in operands) != 1:
            continue
        inputs = []
        for value in operands:
            name = name_of(value)
            if name in weights and name not in constants:
                tensor = ir.tensor(np.ascontiguousarray(weights[name], np.float32))
                constants[name] = ir.Value(name=f"{name}/error", const_value=tensor, type=_FLOAT)
                part.register_initializer(constants[name])
            if name not in weights and name not in entries:
                entries[name] = ir.Value(name=name, type=_FLOAT)
                part.inputs.append(entries[name])
            inputs.append(constants[name] if name in weights else entries[name])
        # Another layer may read the tensor of this name.
        output = ir.Value(name=name_of(node.outputs[0]) + _CHANGE, type=_FLOAT)
        part.append(ir.Node("", node.op_type, inputs, attributes=list(node.attributes.values()), outputs=[output]))
        part.outputs.append(output)
    return ir.Model(part, ir_version=min(graph.model.ir_version, 10)) if len(part) else None


class _Forward:
    """Run the float model and return all tensors of its main graph."""

    def __init__(self, graph: GraphIndex, settings: SessionSettings | None) -> None:
        names = [value.name for node in graph.graph for value in node.outputs if value.name]
        self._session = Loadable.of(graph).with_outputs(names).open(settings)
        # What is no tensor (a sequence, an optional) ends the gradients.
        self._names = [o.name for o in self._session.get_outputs() if o.type.startswith("tensor(")]

    def run(self, sample: Sample, names: Sequence[str] | None = None) -> Tensors:
        """Return the inputs, and the tensors `names` (None for all), for one sample."""
        fetched = self._names if names is None else [name for name in names if name in self._names]
        arrays = (
            run_feed(self._session, fetched, sample.inputs, sample.name, model="the float model") if fetched else ()
        )
        return {**sample.inputs, **dict(zip(fetched, arrays, strict=True))}


@dataclass(frozen=True)
class _Probes:
    sessions: _GradientSessions
    values: Tensors
    weights: Tensors
    count: int
    seed: tuple[int, int]

    def __call__(self, tensors: Collection[str] | None) -> Iterator[Gradients]:
        session, places = self.sessions.open(tensors)
        if not places:
            return
        rng, backward = np.random.default_rng(self.seed), self.sessions.backward
        values = backward.feed(self.values)
        feed = {entry.name: values.get(entry.name) for entry in session.get_inputs()}
        for _ in range(self.count):
            for name, weight in self.weights.items():
                signs = rng.integers(0, 2, weight.shape, np.int8) * 2 - 1
                if backward.directions[name] in feed:
                    feed[backward.directions[name]] = np.asarray(signs * weight, np.float32)
            # A variable would hold the gradients until those of the next direction are there.
            yield dict(zip(places, map(_finite, _fetch(session, feed)), strict=True))


def _fetch(session: Any, feed: Mapping[str, Any]) -> Sequence[NDArray[np.float32]]:
    return run_feed(session, None, feed, "a direction", model="the gradients")


class _GradientSessions:
    """Open a session for the gradients of each group of tensors, with only the nodes that these gradients need.

    Attributes:
        backward: the model of all gradients.
    """

    def __init__(self, backward: Backward, settings: SessionSettings) -> None:
        self.backward = backward
        self._model = Loadable.of(backward.model)
        self._settings = settings
        self._opened: dict[tuple[Place, ...], Any] = {}

    def open(self, tensors: Collection[str] | None) -> tuple[Any, tuple[Place, ...]]:
        """Return a session and the places of its outputs. Without places, the session is None."""
        gradients = self.backward.gradients
        places = tuple(place for place in gradients if tensors is None or place[0] in tensors)
        if places and places not in self._opened:
            part = self._model.only([gradients[place] for place in places], inputs=())
            self._opened[places] = part.open(self._settings)
        return self._opened.get(places), places


def _finite(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return an array with zeros in place of what is not finite: such an element says nothing about an error."""
    # One sum shows whether the elements need a look.
    with np.errstate(over="ignore", invalid="ignore"):
        return array if np.isfinite(array.sum()) else np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0)


def _weigh(
    names: Sequence[str], runs: Sequence[Tensors], samples: Sequence[Sample], basis: Basis, probes: int
) -> list[dict[str, NDArray[np.float32]]]:
    """Return, for each sample, the weight of each element of the tensors `names`, whose values are in `runs`. The parts
    of all samples together get the power 1 / (number of parts x number of directions), and elements that do not count
    get weight 0.
    """
    # The mean over the directions is part of the weights, so that powers only need to be added up.
    weights: list[dict[str, NDArray[np.float32]]] = [{} for _ in samples]
    for name in names:
        arrays = [np.asarray(run[name], np.float32) for run in runs]
        counted = [_counted(basis, name, array, s.inputs) for array, s in zip(arrays, samples, strict=True)]
        powers = [np.where(mask, array, 0).astype(np.float64) ** 2 for mask, array in zip(counted, arrays, strict=True)]
        axis, parts = _find_parts(arrays, counted, samples[0].inputs)
        sums = [sum(float(_part(power, axis, part).sum()) for power in powers) for part in parts]
        audible = sum(total > 0 for total in sums)
        for weight, mask in zip(weights, counted, strict=True):
            scaled = np.zeros(mask.shape, np.float32)
            for part, total in zip(parts, sums, strict=True):
                if total > 0:
                    _part(scaled, axis, part)[...] = (total * audible * len(names) * probes) ** -0.5
            weight[name] = np.where(mask, scaled, np.float32(0))
    return weights


def _counted(basis: Basis, name: str, array: NDArray[Any], inputs: Tensors) -> NDArray[np.bool_]:
    """Return which elements of an output count."""
    # NaN fails the comparison.
    counted = np.asarray(np.abs(array) < basis.limits.get(name, np.inf))
    visible = find_visible(basis.padding, name, array.shape, inputs)
    return counted if visible is None else counted & visible


def _find_parts(
    arrays: Sequence[NDArray[Any]], counted: Sequence[NDArray[np.bool_]], inputs: Tensors
) -> tuple[int, list[slice]]:
    """Return an axis and its slices of like values. A tensor of one unit is one part."""
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or not prod(arrays[0].shape):
        return 0, [slice(None)]
    values, mask = np.stack(arrays), np.stack(counted)
    for axis in sorted(judged_axes(arrays[0].shape, inputs.values(), 1), reverse=True):
        # The stack has one axis more, in front.
        rest = tuple(place for place in range(values.ndim) if place != axis + 1)
        low, high = values.min(rest, initial=np.inf, where=mask), values.max(rest, initial=-np.inf, where=mask)
        empty = ~mask.any(rest)
        slices = like_slices(np.where(empty, 0.0, low), np.where(empty, 0.0, high))
        if slices:
            return axis, [slice(begin, end + 1) for begin, end in slices]
    return 0, [slice(None)]


def _part(array: NDArray[Any], axis: int, part: slice) -> NDArray[Any]:
    return array[(slice(None),) * axis + (part,)] if array.ndim else array
