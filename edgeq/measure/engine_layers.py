"""A Q/DQ model in an engine and in onnxruntime's CPU kernels, tensor by tensor: where their answers part.

Both run the same file, so what differs is arithmetic alone. Every tensor that is quantized is given out by a
DequantizeLinear of its own, which leaves the pairs of the model whole for the engine. Layers behind which most is lost
run once more by themselves, in both fed with what the CPU's kernels made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.measure.comparison import decibels
from edgeq.measure.latency import infer
from edgeq.model.edit import Editor
from edgeq.model.graph import is_constant, is_op, name_of
from edgeq.model.load import save_model
from edgeq.run.engines import EngineChoice
from edgeq.run.session import Engines, SessionSettings
from edgeq.util.display import SILENT, Progress

if TYPE_CHECKING:
    from edgeq.data.records import Sample
    from edgeq.data.samples import Samples

_SEEN = "/seen"
# Samples in a simulator, which takes seconds for one: a tensor has thousands of elements.
_SIMULATED = 2
# Tensors of 8 bits that are this close are equal but for roundings here and there.
_CLEAN_DB = 60.0


@dataclass(frozen=True)
class EngineLayer:
    """A tensor of the quantized model in the engine, held against the same in the CPU's kernels.

    Attributes:
        name: of the tensor, as it is before it is quantized.
        node, op_type: what makes it; "" and "Input" for an input of the model.
        sqnr_db: when the model runs as a whole; infinite where both are equal.
        inputs_db: the least of the tensors that the node reads.
        alone_db: of the layer by itself, fed with the CPU's tensors; None where it was not run so.
        steps: the largest difference of its own, alone where it was run so, in steps of its scale.
    """

    name: str
    node: str
    op_type: str
    sqnr_db: float
    inputs_db: float
    alone_db: float | None
    steps: float

    @property
    def lost_db(self) -> float:
        """What is lost from the tensors that the node reads to the one that it makes."""
        return min(self.inputs_db, _CLEAN_DB) - min(self.sqnr_db, _CLEAN_DB)


def compare_engine(
    model: ir.Model, samples: Samples, choice: EngineChoice, folder: Path, *, most: int, progress: Progress = SILENT
) -> tuple[EngineLayer, ...]:
    """Every quantized activation of `model` in both, in the order of the graph.

    Args:
        folder: an existing one for models.
        most: layers to run alone, at most.

    Raises:
        EngineError, RuntimeUnavailableError: the engine refuses a model.
    """
    observed = _Observed(model)
    places = {name_of(place.tensor): place for place in observed.places}
    few = _SIMULATED if choice.engine.simulated else len(samples)
    chosen = [sample for sample, _ in zip(samples, range(few), strict=False)]
    title = f"Comparing {choice.engine.name} with the CPU's kernels"
    with Engines() as engines, progress.stage(title, len(chosen)) as advance:
        whole = _Both(engines, choice, observed.model, folder / "observed.onnx")
        sums = {name: _Sums(place.step) for name, place in places.items()}
        first: Mapping[str, NDArray[Any]] = {}
        for sample in chosen:
            here, there = whole.run(sample)
            first = first or here
            for name, found in sums.items():
                found.add(here[name + _SEEN], there[name + _SEEN])
            advance(1)
        layers = [place.layer(sums) for place in places.values()]
        suspects = sorted((x for x in layers if x.lost_db > 0), key=lambda x: -x.lost_db)[:most]
        for number, layer in enumerate(suspects):
            place = places[layer.name]
            if place.node is None or not place.reads or place.open:
                continue
            fed = {name: first[name + _SEEN] for name in place.reads}
            part = observed.part(place, fed)
            by_itself = _Sums(place.step)
            both = _Both(engines, choice, part, folder / f"layer-{number}.onnx")
            here, there = both.run(replace(chosen[0], inputs=fed))
            by_itself.add(here[layer.name + _SEEN], there[layer.name + _SEEN])
            layers[layers.index(layer)] = replace(layer, alone_db=by_itself.sqnr_db, steps=by_itself.steps)
    return tuple(layers)


@dataclass
class _Sums:
    step: float
    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, here: NDArray[Any], there: NDArray[Any]) -> None:
        """Add what both computed of the tensor for one sample."""
        exact, differences = here.astype(np.float64), there.astype(np.float64) - here
        self.signal += float((exact**2).sum())
        self.noise += float((differences**2).sum())
        self.largest = max(self.largest, float(np.abs(differences).max(initial=0.0)))

    @property
    def sqnr_db(self) -> float:
        """Power of the tensor over that of the differences, dB, over all samples so far."""
        return decibels(self.signal, self.noise)

    @property
    def steps(self) -> float:
        """Largest difference in steps of the tensor's scale; 0 where it has none."""
        return self.largest / self.step if self.step else 0.0


class _Both:
    """A model in the CPU's kernels, as it is written, and in the engine."""

    def __init__(self, engines: Engines, choice: EngineChoice, model: ir.Model, file: Path) -> None:
        save_model(model, file)
        there = SessionSettings(engine=choice.engine, precision=choice.precision)
        self._here = engines.open(file, SessionSettings(optimization="none"))
        self._there = engines.open(file, there)

    def run(self, sample: Sample) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Every observed tensor by name, as onnxruntime's own kernels and as the engine computed it."""
        return infer(self._here, sample, model="the quantized model"), infer(self._there, sample, model="the engine")


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor that is quantized.

    Attributes:
        quantizer: its QuantizeLinear; `node`: what makes it, None for an input.
        pairs: the nodes between what `node` reads and the tensors `reads`, which are quantized too.
        open: whether `node` reads a float tensor besides.
        step: its scale.
    """

    tensor: ir.Value
    quantizer: ir.Node
    node: ir.Node | None
    pairs: tuple[ir.Node, ...]
    reads: tuple[str, ...]
    open: bool
    step: float

    def layer(self, sums: Mapping[str, _Sums]) -> EngineLayer:
        """The figures of this tensor, beside the worst of those that its node reads."""
        name, mine = name_of(self.tensor), sums[name_of(self.tensor)]
        least = min((sums[read].sqnr_db for read in self.reads if read in sums), default=math.inf)
        node, op_type = ("", "Input") if self.node is None else (str(self.node.name), self.node.op_type)
        return EngineLayer(name, node, op_type, mine.sqnr_db, least, None, mine.steps)


class _Observed:
    """A copy of a model that gives every quantized activation, dequantized, and nothing else."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model.clone()
        editor = Editor(self.model)
        self.places = tuple(_places(self.model))
        self._seen: dict[str, ir.Value] = {}
        for place in self.places:
            integers, scale, zero = place.quantizer.outputs[0], *place.quantizer.inputs[1:3]
            name = name_of(place.tensor)
            seen = editor.node(
                "DequantizeLinear",
                [integers, scale, zero],
                name + _SEEN,
                like=place.tensor,
                dtype=ir.DataType.FLOAT,
                domain=place.quantizer.domain,
            )
            self._seen[name] = seen
        self.model.graph.outputs[:] = self._seen.values()

    def part(self, place: _Place, fed: Mapping[str, NDArray[Any]]) -> ir.Model:
        """The layer that makes a tensor, from quantizing what it reads to dequantizing what it makes."""
        seen = self._seen[name_of(place.tensor)]
        maker = seen.producer()
        assert place.node is not None
        assert maker is not None
        wanted = {*place.pairs, place.node, place.quantizer, maker}
        nodes = [node for node in self.model.graph if node in wanted]
        values = {name_of(v): v for node in place.pairs for v in node.inputs if v is not None}
        used = {value for node in nodes for value in node.inputs if value is not None}
        view = ir.GraphView(
            [values[name] for name in fed],
            [seen],
            nodes=nodes,
            initializers=[v for v in self.model.graph.initializers.values() if v in used],
            opset_imports=self.model.graph.opset_imports,
            name="layer",
        )
        part = view.clone()
        for value in part.inputs:
            value.shape, value.type = ir.Shape(fed[name_of(value)].shape), ir.TensorType(ir.DataType.FLOAT)
        return ir.Model(part, ir_version=self.model.ir_version)


def _places(model: ir.Model) -> Iterator[_Place]:
    known: set[ir.Value] = set()
    for node in model.graph:
        tensor = node.inputs[0] if is_op(node, "QuantizeLinear") else None
        if tensor is None or tensor in known or is_constant(tensor):
            continue
        known.add(tensor)
        maker = tensor.producer()
        pairs, reads, floats = _reads(maker) if maker is not None else ((), (), False)
        step = node.inputs[1].const_value if node.inputs[1] is not None else None
        yield _Place(tensor, node, maker, pairs, reads, floats, float(step.numpy().max()) if step is not None else 0.0)


def _reads(node: ir.Node) -> tuple[tuple[ir.Node, ...], tuple[str, ...], bool]:
    """(pairs in front of a node, the tensors that they quantize, whether it reads a float that is not constant)."""
    pairs: list[ir.Node] = []
    reads: list[str] = []
    floats = False
    restored: Sequence[ir.Node | None] = (
        [node]
        if is_op(node, "DequantizeLinear")
        else [value.producer() if value is not None else None for value in node.inputs]
    )
    for value, maker in zip(node.inputs, restored, strict=False):
        if maker is None or not is_op(maker, "DequantizeLinear"):
            floats |= value is not None and not is_constant(value)
            continue
        source = maker.inputs[0].producer() if maker.inputs[0] is not None else None
        pairs.append(maker)
        if source is not None and is_op(source, "QuantizeLinear") and source.inputs[0] is not None:
            pairs.append(source)
            if not is_constant(source.inputs[0]):
                reads.append(name_of(source.inputs[0]))
    return tuple(dict.fromkeys(pairs)), tuple(dict.fromkeys(reads)), floats
