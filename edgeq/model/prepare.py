"""Prepare an untrusted model file for all backends."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from edgeq.errors import ModelError, RuntimeUnavailableError, one_line
from edgeq.model.affine import fold_affine
from edgeq.model.branches import merge_branches
from edgeq.model.clean import forget_origin, remove_no_ops, tidy
from edgeq.model.convert import external_folder, from_proto, to_proto, update_shapes
from edgeq.model.digests import model_digest
from edgeq.model.einsum import write_einsums
from edgeq.model.files import INLINE_LIMIT, model_files
from edgeq.model.fold import fold_batch_norms
from edgeq.model.functions import inline_functions
from edgeq.model.gemm import plain_gemms
from edgeq.model.graph import (
    GraphIndex,
    computed_constants,
    every_node,
    is_op,
    name_of,
    opset_of,
    random_nodes,
    random_tensors,
)
from edgeq.model.half import widen_half
from edgeq.model.hard_sigmoid import write_hard_sigmoids
from edgeq.model.load import check_valid, data_folder, is_quantized, load_model, read_model, save_model, signature_of
from edgeq.model.names import name_nodes, separate_names
from edgeq.model.opset import raise_opset
from edgeq.model.pools import write_global_pools
from edgeq.model.scaler import write_scalers
from edgeq.model.shapes import describe, unknown_shapes, write_shapes
from edgeq.model.sizes import fix_sizes
from edgeq.model.skeleton import proto_skeleton
from edgeq.model.space_to_depth import join_slices
from edgeq.model.tensors import weight_bytes
from edgeq.run.session import SessionSettings, onnxruntime, open_session
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Progress

# Optimizers that edgeq switches off. ConstantSharing renames weights. The next two introduce quantized or
# layout-specific forms, which only a backend should choose. The last one (since 1.32) reorders channels with a Gather,
# whereas edgeq.model.space_to_depth reorders the weights.
_DISABLED = ("ConstantSharing", "WeightBiasQuantization", "NchwcTransformer", "SliceConcatToSpaceToDepthFusion")


def optimize_basic(model: Path, optimized: Path, *, source: Path, external: bool) -> None:
    """Optimise `model` with ONNX Runtime's basic level, and write the result to `optimized`.

    The basic level produces only standard operators. Higher levels add fused and hardware-specific operators.

    Args:
        source: the file that the user gave, for messages.
        external: whether to write the weights to external data next to `optimized`. Models near 2 GB need this.

    Raises:
        ModelError: onnxruntime refuses the model.
        RuntimeUnavailableError: onnxruntime is not installed.
        OSError: there is no space for `optimized`.
    """
    version = onnxruntime().__version__
    config = {"optimization.disable_specified_optimizers": ";".join(_DISABLED)}
    # Weights stay in data files, because protobuf could not hold them together with the graph.
    if external:
        config["session.optimized_model_external_initializers_file_name"] = f"{optimized.name}.data"
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    settings = SessionSettings(config=config, optimization="basic", save_optimized_to=optimized, draws=True)
    try:
        open_session(model, settings)
    except RuntimeUnavailableError as error:
        text = one_line(error.__cause__ or error).replace(str(model), source.name)
        raise ModelError(
            f"{source}: onnxruntime {version} refuses it: {one_line(text, most=300)}",
            "Run it in onnxruntime where it was exported; if an operator is unknown, use a newer onnxruntime",
        ) from error


def normalise(model: ir.Model, original: ir.Model) -> None:
    """Normalise a model that ONNX Runtime wrote, in place. The model gets the producer and metadata of `original`, and
    keeps only the operator sets that it uses. Its weights are listed in the order in which nodes use them, because ONNX
    Runtime lists them in the order of a hash table.
    """
    metadata = dict(original.metadata_props)
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    model.domain, model.model_version, model.doc_string = original.domain, original.model_version, original.doc_string
    model.metadata_props.clear()
    model.metadata_props.update(metadata)
    # ONNX Runtime lists every domain that it knows, whether the model uses it or not.
    RemoveUnusedOpsetsPass(process_functions=False)(model)
    for graph in model.graphs():
        used = [v.name for node in graph.all_nodes() for v in node.inputs if v is not None and v.is_initializer()]
        # In reverse, so that the first use of a name decides.
        rank = {name: position for position, name in reversed(list(enumerate(used)))}
        values = sorted(graph.initializers.values(), key=lambda v: (rank.get(v.name, len(used)), v.name or ""))
        graph.initializers.clear()
        for value in values:
            graph.register_initializer(value)


PREPARED_NAME = "prepared.onnx"
_RUNTIME_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# Domains that occur only after the last level of ONNX Runtime's optimisation. A model that uses them runs only on the
# kind of CPU on which it was saved.
_LAYOUT_DOMAINS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
# Layers fused with their activation. They occur from the second-to-last level of the optimisation on, and no quantizer
# accepts them.
_FUSED = frozenset({"FusedConv", "FusedGemm", "NhwcFusedConv"})
# Most names in a note. A line of more names is hard to read.
_LISTED = 8


@dataclass(frozen=True)
class PreparedModel:
    """Hold a model that is ready for calibration and quantization.

    Attributes:
        graph: index of the prepared model in memory. It is shared: to change the model, change a `clone()`. When two
            objects are compared, the digest is compared instead of the graph.
        path: the same model as a file in the work directory, for sessions (`prepared.onnx`, plus `prepared.onnx.data`
            if it is large).
        source: the file from which the model was prepared.
        digest: `edgeq.model.digests.model_digest` of `path`; the same source gives the same digest.
        signature: inputs and outputs, with the names and types of the source. More sizes may be known than in the
            source.
        notes: changes and other remarks, as sentences.
        hazards: for each tensor that must not be in 8 bits, the part of the reason after the tensor's name. It is known
            only after calibration (`edgeq.calibration.hazards`).
        unseen: float inputs that are zero in all calibration samples. They are known only after calibration.
    """

    graph: GraphIndex = field(compare=False, repr=False)
    path: Path
    source: Path
    digest: str
    signature: Signature
    notes: tuple[str, ...]
    hazards: Mapping[str, str] = field(default_factory=dict, compare=False)
    unseen: tuple[str, ...] = field(default=(), compare=False)

    @property
    def model(self) -> ir.Model:
        """Return the prepared model."""
        return self.graph.model


def prepare_model(
    source: Path,
    workdir: Path,
    *,
    loaded: ir.Model | None = None,
    simplify: bool = True,
    fix: Mapping[str, int] | None = None,
    progress: Progress = SILENT,
    inline_limit: int = INLINE_LIMIT,
) -> PreparedModel:
    """Load the untrusted file `source` and write the prepared model into `workdir`. An earlier prepared model in this
    folder is replaced.

    The steps, in order:

    1. Check the model, inline local functions, raise the opset to 13 or later, and name the nodes.
    2. Remove Constant nodes and dead code, and widen 16-bit floats to float32.
    3. Remove Identity and Dropout. Fold BatchNormalization, and products and sums with constants, into layers. Merge
       convolutions that read the same tensor if their results are added. Replace hard sigmoids by one operator,
       means over images by GlobalAveragePool, Einsum by products, and Scaler by a difference and a product.
    4. Run ONNX Runtime's basic optimisation.
    5. Bring Gemm into a form that can be quantized, and join strided slices.
    6. Infer shapes and check the model again.

    The results are the same as those of the source to float32's accuracy. Tensors and nodes that remain keep their
    names, with one exception: an inner tensor is renamed if a quantizer would derive the same name from another tensor
    (`edgeq.model.names`).

    Args:
        loaded: result of `read_model` for `source`, if the file was read before. It is not changed.
        simplify: False keeps every node that an output depends on. No such node is removed, folded or optimised.
        fix: numbers for free sizes of the inputs, by name; see `edgeq.model.sizes`.
        inline_limit: size of the weights, in bytes, above which the prepared model keeps them in external data.

    Raises:
        UsageError: `fix` names a size that is not free.
        ModelError: the model is damaged, is already quantized, has an opset that is too old to be raised, or has
            operators that ONNX Runtime does not know.
    """
    notes: list[str] = []
    with progress.stage("Preparing the model", total=4) as advance:
        model = _load_named(source, loaded, notes)
        # Sizes are fixed before the passes, because more can be folded if sizes are known.
        if fix:
            fix_sizes(model, fix, source)
            notes.append(f"sizes fixed: {', '.join(f'{name} = {size}' for name, size in fix.items())}")
        external = weight_bytes(model) > inline_limit
        advance(1)
        # Notes go before the passes, which would otherwise copy them with every node.
        forget_origin(model)
        _apply(_EARLY_PASSES, model, notes, simplify=simplify)
        advance(1)
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare.", dir=workdir) as scratch:
            original, operators = model, Counter(node.op_type for node in every_node(model))
            if simplify:
                model = _optimize(model, Path(scratch), source, inline_limit, external=external)
            advance(1)
            _apply(_LATE_PASSES, model, notes, simplify=simplify)
            normalise(model, original)
            name_nodes(model)
            proto = _add_shapes(model, notes, source)
            notes.extend(_difference_notes(operators, model))
            path = workdir / PREPARED_NAME
            # A smaller model needs no data file, and one from an earlier run would look like a part of it.
            (workdir / f"{PREPARED_NAME}.data").unlink(missing_ok=True)
            save_model(model, path, inline_limit=inline_limit, proto=proto)
        advance(1)
    notes.extend(_random_note(model))
    large = len(model_files(path)) > 1
    if large:
        notes.append(f"weights kept in external data ({PREPARED_NAME}.data)")
    # If the external data of `model` was in the scratch folder, it is deleted now. So a large model is read again.
    graph = GraphIndex(read_model(path) if large else model, path)
    return PreparedModel(graph, path, source, model_digest(path), signature_of(proto, path), tuple(notes))


def save_rewritten(prepared: PreparedModel, model: ir.Model, path: Path, *notes: str) -> PreparedModel:
    """Write `model` to `path`, and return a copy of `prepared` that contains `model`. Do not change `model`
    afterwards.
    """
    save_model(model, path)
    graph = GraphIndex(model, path)
    return replace(prepared, graph=graph, path=path, digest=model_digest(path), notes=(*prepared.notes, *notes))


def _load_named(source: Path, loaded: ir.Model | None, notes: list[str]) -> ir.Model:
    """Return the model after four steps: its functions are inlined, its opset is raised, its shapes are inferred and
    its nodes are named.
    """
    bare: onnx.ModelProto | None = None
    if loaded is not None:
        model = loaded.clone()
    else:
        proto = load_model(source, external_data="none")
        signature_of(proto, source)
        model, bare = from_proto(proto, data_folder(proto, source), label=source), proto_skeleton(proto)
    # Quantizing twice would round twice, and the message would come from deep within a pass.
    if is_quantized(model):
        raise ModelError(
            f"{source} is quantized already",
            "Give the float32 model that it was made from, or rewrite it with `edgeq retarget`",
        )
    if model.functions:
        notes.append(f"{_count(len(model.functions), 'local function')} inlined")
        inline_functions(model, source)
        bare = None
    _refuse_unknown_domains(model, source)
    _refuse_training(model, source)
    opset = opset_of(model)
    model = raise_opset(model, source)
    if opset_of(model) != opset:
        notes.append(f"opset {opset} → {opset_of(model)}")
        bare = None
    describe(model, source, bare)
    fused = sorted({node.op_type for node in every_node(model)} & _FUSED)
    if fused:
        notes.append(
            f"{', '.join(fused)}: ONNX Runtime's optimiser made these, and they stay in float; give the model as it "
            "was exported, before it was optimised"
        )
    named = name_nodes(model)
    if named:
        notes.append(f"{_count(named, 'node')} named, which had no name of their own")
    return model


def _refuse_unknown_domains(model: ir.Model, source: Path) -> None:
    for node in every_node(model):
        if node.domain not in _RUNTIME_DOMAINS:
            if node.domain in _LAYOUT_DOMAINS:
                raise ModelError(
                    f"{source} was saved by ONNX Runtime after its full optimisation, for one kind of CPU: "
                    f"node {node.name!r} is a {node.op_type!r} of {node.domain!r}, which cannot be quantized",
                    "Give the model as it was exported, before ONNX Runtime optimised it; edgeq optimises it itself",
                )
            raise ModelError(
                f"{source}: node {node.name!r} is a {node.op_type!r} of the custom domain {node.domain!r}",
                "edgeq supports only operators that ONNX Runtime has; export the model without custom operators",
            )


def _refuse_training(model: ir.Model, source: Path) -> None:
    """Refuse a norm that computes its statistics from the batch, so that samples would depend on each other."""
    for node in every_node(model):
        if is_op(node, "BatchNormalization") and node.attributes.get_int("training_mode", 0) == 1:
            raise ModelError(
                f"{source}: node {node.name!r} is a BatchNormalization in training mode",
                "Export the model for inference: in PyTorch, call its eval() first",
            )


@dataclass(frozen=True)
class Pass:
    """Define a step of the preparation.

    Attributes:
        run: function that changes a model in place and returns the changes, as a number, names or sentences.
        sentence: function that turns the changes into one or more notes. If the changes are numbers, it gets the total
            of all runs of the step so far. With None, a later run of the step adds the note.
        always: whether the step runs even if `simplify` is False.
    """

    run: Callable[[ir.Model], int | tuple[str, ...]]
    sentence: Callable[[Any], str | tuple[str, ...]] | None = None
    always: bool = False


def _apply(passes: Sequence[Pass], model: ir.Model, notes: list[str], *, simplify: bool) -> None:
    """Run the passes on a model, in place, and add notes on their changes."""
    counts: Counter[object] = Counter()
    for step in passes:
        if not (simplify or step.always):
            continue
        changed = step.run(model)
        # A step may run twice. Its note states the total, once.
        if isinstance(changed, int):
            counts[step.run] += changed
            changed = counts[step.run]
        if changed and step.sentence is not None:
            sentence = step.sentence(changed)
            notes.extend((sentence,) if isinstance(sentence, str) else sentence)


def _fold_late_norms(model: ir.Model) -> tuple[str, ...]:
    """Fold BatchNormalizations that can be folded only after ONNX Runtime's optimisation, in place. They follow a Gemm
    that ONNX Runtime made from MatMul and Add.
    """
    notes: list[str] = []
    folded = fold_batch_norms(model, notes)
    late = (f"{folded} BatchNormalization folded after ONNX Runtime's optimisation",) if folded else ()
    return (*late, *notes)


def _no_ops_note(removed: int) -> str:
    clause = f"removed that {'does' if removed == 1 else 'do'} nothing"
    return f"{_count(removed, 'node')} {clause} (Identity, Dropout, Cast to the same type, empty Pad)"


# Passes that run before ONNX Runtime's basic optimisation.
_EARLY_PASSES = (
    Pass(tidy, lambda dead: f"{_count(dead, 'node')} removed that no output depends on", always=True),
    Pass(widen_half, lambda wide: f"16-bit floats widened to float32 ({_count(wide, 'weight')})", always=True),
    Pass(remove_no_ops, _no_ops_note),
    Pass(write_einsums, lambda n: f"{_count(n, 'Einsum')} written as {'a product' if n == 1 else 'products'}"),
    # Folded here for the norms that follow, and once more below for what the norms and merged branches leave.
    Pass(fold_affine),
    Pass(fold_batch_norms, lambda folded: f"{folded} BatchNormalization folded"),
    Pass(merge_branches, lambda n: f"{_count(n, 'sum')} of convolutions of one tensor written as one convolution"),
    Pass(
        fold_affine,
        lambda n: f"{_count(n, 'product or sum', 'products or sums')} with constants folded into layers",
    ),
    Pass(write_global_pools, lambda n: f"{_count(n, 'mean')} over whole images written as GlobalAveragePool"),
    Pass(write_hard_sigmoids, lambda n: f"{_count(n, 'hard sigmoid')} written as one operator"),
    # Last, because the products and sums above are folded into layers.
    Pass(write_scalers, lambda n: f"{_count(n, 'Scaler')} written as a difference and a product"),
)

# Passes that run after ONNX Runtime's basic optimisation.
_LATE_PASSES = (
    Pass(tidy, always=True),
    Pass(remove_no_ops),
    Pass(_fold_late_norms, lambda sentences: sentences),
    Pass(plain_gemms, lambda n: f"{_count(n, 'Gemm')} without factors, with one bias for each output"),
    Pass(join_slices, lambda n: f"{_count(n, 'Concat')} of strided slices written as SpaceToDepth"),
    Pass(tidy),
    Pass(
        separate_names,
        lambda names: f"{_count(len(names), 'tensor')} renamed, because quantizers make such names ({_listing(names)})",
        always=True,
    ),
)


def _optimize(model: ir.Model, scratch: Path, source: Path, inline_limit: int, *, external: bool) -> ir.Model:
    """Return the model after ONNX Runtime's basic optimisation. If the optimisation changes nothing, return `model`
    itself.

    Args:
        scratch: a folder that exists until the result is saved.
        external: see `optimize_basic`.
    """
    raw, optimized = scratch / "raw.onnx", scratch / "optimized.onnx"
    proto = to_proto(model) if not external and external_folder(model) is None else None
    save_model(model, raw, inline_limit=inline_limit, proto=proto)
    optimize_basic(raw, optimized, source=source, external=external)
    optimized_proto = onnx.load(optimized, load_external_data=False)
    # The model in memory then serves on, and nothing has to be read again.
    if proto is not None and _is_unchanged(proto, optimized_proto):
        return model
    optimized_model = from_proto(optimized_proto, scratch, label=source)
    # A second run folds what the first one uncovered.
    if not _is_unfolded(optimized_model):
        return optimized_model
    folded = scratch / "folded.onnx"
    optimize_basic(optimized, folded, source=source, external=external)
    return ir.load(folded)


def _is_unchanged(original: onnx.ModelProto, optimized: onnx.ModelProto) -> bool:
    """Return whether ONNX Runtime wrote the same nodes, values and types that it read. Unused weights may be
    missing.
    """
    tensors = {tensor.name: tensor for tensor in original.graph.initializer}
    described = [{value.name: value for value in graph.value_info} for graph in (original.graph, optimized.graph)]
    return (
        original.ir_version == optimized.ir_version
        and original.graph.node == optimized.graph.node
        and original.graph.input == optimized.graph.input
        and original.graph.output == optimized.graph.output
        and described[0] == described[1]
        and all(tensors.get(tensor.name) == tensor for tensor in optimized.graph.initializer)
    )


def _is_unfolded(model: ir.Model) -> bool:
    """Return whether a node reads only constants. Such nodes remain if ONNX Runtime expands functions such as
    GroupNormalization, because it folds constants before it expands functions.
    """
    constants = computed_constants(model.graph)
    operands = ([name_of(value) for value in node.inputs if value is not None] for node in model.graph)
    return any(names and constants.issuperset(names) for names in operands)


def _add_shapes(model: ir.Model, notes: list[str], source: Path) -> onnx.ModelProto:
    """Infer the shapes of a model in place, check the model, and return it as protobuf."""
    strange = sorted({n.domain for n in every_node(model)} - _RUNTIME_DOMAINS)
    if strange:
        raise ModelError(
            f"{source}: its preparation added operators of the domain {strange[0]!r}", "Please report this model"
        )
    proto = to_proto(model)
    if problem := write_shapes(model, bare=proto_skeleton(proto)):
        notes.append(f"symbolic shape inference gave up ({problem}); onnx's own was used")
    unknown = unknown_shapes(model)
    if unknown:
        notes.append(f"{_count(len(unknown), 'tensor')} of unknown shape: {_listing(unknown)}")
    update_shapes(proto, model)
    check_valid(proto, source)
    return proto


def _difference_notes(old: Mapping[str, int], model: ir.Model) -> list[str]:
    """Return a note on the operator types whose number was changed by ONNX Runtime's optimisation. `old` contains the
    numbers before it.
    """
    new = Counter(n.op_type for n in every_node(model))
    changed = [f"{op} {old[op]} → {new[op]}" for op in sorted({*old, *new}) if old[op] != new[op]]
    return [f"ONNX Runtime's basic optimisation: {', '.join(changed)}"] if changed else []


def _random_note(model: ir.Model) -> Iterator[str]:
    """Yield a note on the operators of a model that draw random numbers, if it has any."""
    nodes = random_nodes(model)
    if nodes:
        random = random_tensors(model.graph)
        outputs = [name for value in model.graph.outputs if (name := name_of(value)) in random]
        yield (
            f"draws random numbers: {_listing([f'{node.op_type} {node.name!r}' for node in nodes])}; edgeq gives both "
            "models the same numbers to compare them, and the quantized model draws its own"
        ) + (f"; a self-test leaves out {_listing(outputs)}" if outputs else "")


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
