"""Collect the facts that `edgeq inspect` reports about a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.system.places import scratch_folder

from edgeq.errors import UsageError
from edgeq.model.convert import from_proto
from edgeq.model.digests import model_digest
from edgeq.model.files import model_files
from edgeq.model.graph import MAIN_DOMAINS, constant_tensor, every_node, opset_of
from edgeq.model.int8_prediction import NodePrediction, predict_int8
from edgeq.model.int8_rules import int8_rules, rules_title
from edgeq.model.load import data_folder, is_quantized, load_model, signature_of
from edgeq.model.macs import assumed_shapes, node_macs, with_sizes
from edgeq.model.names import node_names
from edgeq.model.opset import LOWEST, RAISED_TO
from edgeq.model.prepare import prepare_model
from edgeq.scheme import Scheme
from edgeq.signature import Signature, TensorSpec
from edgeq.util.display import SILENT, Page, Progress
from edgeq.util.records import NOT_WRITTEN, computed, write_as

Refusals = Callable[[ir.Model, Path], Mapping[str, str]]
"""Return the nodes of a prepared model that a backend refuses, each with the reason (`Backend.refusals`)."""
Remarks = Callable[[ir.Model, Path], tuple[str, ...]]
"""Return sentences about a prepared model on a target's hardware (`Backend.remarks`)."""


@dataclass(frozen=True)
class OperatorCount:
    """Hold the number of nodes of one operator type, and the multiply-accumulates of all of them."""

    op_type: str
    count: int
    macs: int


@dataclass(frozen=True)
class TargetPrediction:
    """Predict which nodes run in int8 on one target, from the backend's rules and the scheme in the target's
    profile.

    Attributes:
        refused: the nodes because of which the backend will refuse the model, each with the reason. The name "" stands
            for the whole model.
    """

    target: str
    backend: str
    nodes: tuple[NodePrediction, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def int8_mac_share(self) -> float:
        """Return the share of multiply-accumulates that will run in int8, 0 to 1. Return 0 if the model has none."""
        total = sum(n.macs for n in self.nodes)
        return sum(n.macs for n in self.nodes if n.verdict == "int8") / total if total else 0.0

    def __record__(self) -> dict[str, Any]:
        verdicts = Counter(n.verdict for n in self.nodes)
        return {
            "target": self.target,
            "backend": self.backend,
            "basis": "forecast",
            "how": rules_title(self.backend),
            "int8_mac_share": self.int8_mac_share,
            "int8_nodes": verdicts["int8"],
            "float_nodes": verdicts["float"],
            "other_nodes": verdicts["other"],
            "refused": self.refused,
            "nodes": self.nodes,
        }


@dataclass(frozen=True)
class ModelReport(Page):
    """Describe a model.

    Attributes:
        path: the model file.
        files: the model file and its external data files.
        bytes: total size of `files`.
        digest: SHA-256 of the model.
        ir_version, opsets, producer: values stored in the model. The main operator set is "ai.onnx".
        parameters, parameter_bytes: number of elements, and of bytes, of all initializers and Constant nodes.
        macs: multiply-accumulates of one inference, counted with the sizes in `assumed`.
        assumed: assumed sizes of inputs with free sizes, by input.
        operators: counts by operator type, sorted by the amount of work.
        dynamic: symbolic and unknown sizes of the inputs, as "input[axis] name".
        quantized: whether the model already contains quantized operators.
        preparation: changes that preparation for quantization makes; empty without targets.
        targets: predictions for the prepared model, one for each target.
        notes: further remarks.
        facts: what files state about the model: fact → its `value` in short, and its `source`.
        head: the head that the outputs fit: `family`, `task`, and `source`; None if no head is found.
    """

    path: Path = field(metadata=write_as(name="model"))
    files: tuple[Path, ...]
    bytes: int
    digest: str = field(metadata=write_as(name="sha256"))
    ir_version: int
    opsets: Mapping[str, int]
    producer: str
    signature: Signature = field(metadata=NOT_WRITTEN)
    parameters: int
    parameter_bytes: int
    macs: int
    operators: tuple[OperatorCount, ...]
    dynamic: tuple[str, ...]
    assumed: Mapping[str, tuple[int, ...]]
    quantized: bool
    preparation: tuple[str, ...]
    targets: tuple[TargetPrediction, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    head: Mapping[str, str] | None = None

    @computed
    def inputs(self) -> list[dict[str, Any]]:
        """Return name, dtype and shape of each input."""
        return [_plain_spec(spec) for spec in self.signature.inputs]

    @computed
    def outputs(self) -> list[dict[str, Any]]:
        """Return name, dtype and shape of each output."""
        return [_plain_spec(spec) for spec in self.signature.outputs]

    def __brief__(self) -> dict[str, Any]:
        facts = {"path": self.path, "parameters": self.parameters, "macs": self.macs, "quantized": self.quantized}
        forecast = {f"int8 on {t.target}": t.int8_mac_share for t in self.targets}
        inputs, outputs = ([str(spec) for spec in specs] for specs in (self.signature.inputs, self.signature.outputs))
        return {**facts, "inputs": inputs, "outputs": outputs, "operators": self.operators, **forecast}

    def __page__(self) -> dict[str, Any]:
        facts = {"size": f"{self.bytes:,} bytes", "parameters": f"{self.parameters:,}", "MACs": f"{self.macs:,}"}
        specs = [("input", self.signature.inputs), ("output", self.signature.outputs)]
        rows = [*facts.items(), *((title, str(spec)) for title, group in specs for spec in group)]
        operators = [(o.op_type, str(o.count), f"{o.macs:,}") for o in self.operators]
        forecast = [
            (t.target, t.backend, f"{t.int8_mac_share:.1%}", str(sum(n.verdict == "float" for n in t.nodes)))
            for t in self.targets
        ]
        stated = [(name.replace("_", " "), fact["value"], fact["source"]) for name, fact in self.facts.items()]
        tables = [
            ("Model", ("", ""), rows),
            *([("Facts", ("fact", "value", "source"), stated)] if stated else []),
            ("Operators", ("operator", "count", "MACs"), operators),
            ("Forecast", ("target", "backend", "MACs in int8", "nodes in float"), forecast),
        ]
        return {"name": self.path.name, "tables": tables, "notes": list(self.notes)}


def inspect_model(
    path: Path,
    targets: Sequence[tuple[str, str, Scheme]] = (),
    *,
    refusals: Mapping[str, Refusals] | None = None,
    remarks: Mapping[str, Remarks] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Progress = SILENT,
) -> ModelReport:
    """Read a model and describe it. For each target, predict which nodes will run in int8, and explain why the others
    will not.

    Args:
        targets: (name to show, backend, scheme) of each target.
        refusals: functions that return the nodes that a target's backend refuses, by the name to show.
        remarks: functions that return a target's notes on the model, by the name to show.
        shapes: sizes for inputs that have free sizes, by input.

    Raises:
        ModelError: the file is not a model, or the model cannot be prepared for a prediction.
        HardwareError: a backend has no rules.
        UsageError: `shapes` does not match the model's inputs.
    """
    # An unknown backend is refused before the model is read, which may take long.
    rules = [(name, backend, int8_rules(backend), scheme) for name, backend, scheme in targets]
    # The facts need no values of weights, so large models are described at once.
    proto = load_model(path, external_data="none")
    signature = signature_of(proto, path)
    model = from_proto(proto, data_folder(proto, path), label=path)
    files = model_files(path)
    quantized = is_quantized(model)
    notes = _notes(model)
    for name, sizes in (shapes or {}).items():
        _check_shape(model, name, sizes, path)
    assumed = assumed_shapes(model, shapes or {})
    for name, sizes in assumed.items():
        declared_shape = next(value.shape for value in model.graph.inputs if value.name == name) or ()
        # A size of 1 is a batch of one sample, which needs no remark.
        guessed = [size for size, open_ in zip(sizes, declared_shape, strict=True) if size > 1 and size != open_]
        if name not in (shapes or {}) and guessed:
            listed = ",".join(map(str, sizes))
            notes.append(
                f"counted with {name} = {listed}, because its sizes are free; ⟨shapes⟩ {name}=SIZES sets others"
            )
    preparation: tuple[str, ...] = ()
    predictions: tuple[TargetPrediction, ...] = ()
    # A forecast asks what would become of float nodes, and a quantized model has none left.
    if quantized and rules:
        notes.append("quantized already: a prediction needs the float32 model that it was made from")
    elif rules:
        # The forecast is for the prepared model, because that is what a backend quantizes.
        with scratch_folder("edgeq-") as workdir:
            prepared = prepare_model(path, Path(workdir), progress=progress)
            preparation = prepared.notes
            # Preparation keeps free sizes free, so the products are counted on a copy with sizes.
            sized_model = with_sizes(prepared.model, assumed)
            sized_macs = node_macs(sized_model)
            refused = {
                name: _refused(refuse, prepared.model, sized_model, path) for name, refuse in (refusals or {}).items()
            }
            notes += [f"{name}: {note}" for name, find in (remarks or {}).items() for note in find(sized_model, path)]
            predictions = tuple(
                TargetPrediction(
                    name, backend, predict_int8(prepared.model, r, scheme, sized_macs), refused.get(name, {})
                )
                for name, backend, r, scheme in rules
            )
    macs = node_macs(with_sizes(model, assumed))
    weights = [v.const_value for graph in model.graphs() for v in graph.initializers.values() if v.const_value]
    constants = (constant_tensor(node.outputs[0]) for node in every_node(model) if node.op_type == "Constant")
    # Some exporters write weights as Constant nodes, which would be missing among the initializers.
    weights += [tensor for tensor in constants if tensor is not None]
    return ModelReport(
        path=path,
        files=files,
        bytes=sum(f.stat().st_size for f in files),
        digest=model_digest(path),
        ir_version=model.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        producer=f"{model.producer_name or ''} {model.producer_version or ''}".strip(),
        signature=signature,
        parameters=sum(int(tensor.size) for tensor in weights),
        parameter_bytes=sum(int(tensor.nbytes) for tensor in weights),
        macs=sum(macs.values()),
        operators=_operators(model, macs),
        dynamic=tuple(d for spec in signature.inputs for d in _dynamic(spec)),
        assumed=assumed,
        quantized=quantized,
        preparation=preparation,
        targets=predictions,
        notes=tuple(notes),
    )


def _refused(refuse: Refusals, model: ir.Model, sized_model: ir.Model, path: Path) -> Mapping[str, str]:
    """Return the nodes that a backend refuses. If it refuses the whole model because sizes are free, also return the
    nodes that it refuses with assumed sizes.

    Args:
        sized_model: the same model with assumed sizes.
    """
    reasons = refuse(model, path)
    # A user who fixes the sizes would otherwise learn of the refused nodes only in the next attempt.
    return {**refuse(sized_model, path), **reasons} if "" in reasons else reasons


def _operators(model: ir.Model, macs: Mapping[str, int]) -> tuple[OperatorCount, ...]:
    counts: Counter[str] = Counter()
    work: Counter[str] = Counter()
    for node, name in node_names(model).items():
        op_type = node.op_type if node.domain in MAIN_DOMAINS else f"{node.domain}.{node.op_type}"
        counts[op_type] += 1
        work[op_type] += macs[name]
    return tuple(
        OperatorCount(op, counts[op], work[op]) for op in sorted(counts, key=lambda o: (-work[o], -counts[o], o))
    )


def _notes(model: ir.Model) -> list[str]:
    notes = []
    opset = opset_of(model)
    if opset < LOWEST:
        notes.append(f"opset {opset} has no per-channel QuantizeLinear; quantizing raises it to {RAISED_TO}")
    # Up to IR version 3, every weight also had to be listed as an input.
    listed = sum(value.is_initializer() for value in model.graph.inputs)
    if listed:
        notes.append(f"weights also listed as inputs: {listed}; edgeq treats them as constants")
    types = {value.dtype for value in model.graph.initializers.values()}
    if types & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        notes.append("has 16-bit floating-point weights; quantizing widens them to float32 first")
    if ir.DataType.DOUBLE in types:
        notes.append("has float64 weights, which are not quantized; export in float32")
    domains = sorted({node.domain for node in every_node(model)} - {*MAIN_DOMAINS, "ai.onnx.ml"})
    if domains:
        notes.append(f"has operators of other domains: {', '.join(domains)}")
    return notes


def _check_shape(model: ir.Model, name: str, sizes: Sequence[int], path: Path) -> None:
    value = next((value for value in model.graph.inputs if value.name == name), None)
    if value is None:
        raise UsageError(f"{path} has no input {name!r}", "Name one of its inputs in ⟨shapes⟩")
    declared_shape = value.shape
    # Lengths are compared below, so a pair that is missing here is no mistake.
    fixed = [] if declared_shape is None else list(zip(declared_shape, sizes, strict=False))
    if declared_shape is not None and (
        len(declared_shape) != len(sizes) or any(isinstance(a, int) and 0 < a != b for a, b in fixed)
    ):
        raise UsageError(f"{path}: input {name!r} is {declared_shape}, not {list(sizes)}", "Correct ⟨shapes⟩")


def _dynamic(spec: TensorSpec) -> list[str]:
    if spec.shape is None:
        return [f"{spec.name} ?"]
    return [f"{spec.name}[{i}] {'?' if d is None else d}" for i, d in enumerate(spec.shape) if not isinstance(d, int)]


def _plain_spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": str(spec.dtype), "shape": None if spec.shape is None else list(spec.shape)}
