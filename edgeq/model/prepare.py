"""From an untrusted model file to one that every backend can start from."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from edgeq.errors import ModelError, RuntimeUnavailableError
from edgeq.model.clean import name_nodes, separate_names
from edgeq.model.compatibility import fix_sizes
from edgeq.model.edit import external_folder, from_proto, to_bytes, to_proto
from edgeq.model.fold import inline_functions, raise_opset
from edgeq.model.graph import GraphIndex, every_node, name_of, opset_of
from edgeq.model.load import (
    INLINE_LIMIT,
    check_valid,
    data_folder,
    is_quantized,
    load_model,
    model_digest,
    model_files,
    read_model,
    save_model,
    signature_of,
)
from edgeq.model.shapes import describe, unknown_shapes, write_shapes
from edgeq.model.tensors import skeleton, weight_bytes
from edgeq.run.session import SessionSettings, onnxruntime, open_session
from edgeq.signature import Signature
from edgeq.util.display import SILENT, Progress

# ConstantSharing renames weights; the next two choose quantized or layout-specific forms, a backend's business; the
# last (from 1.32) puts the channels in order by a Gather, where edgeq.model.rewrites does it in the weights.
_DISABLED = ("ConstantSharing", "WeightBiasQuantization", "NchwcTransformer", "SliceConcatToSpaceToDepthFusion")


def optimize_basic(model: Path, optimized: Path, *, source: Path, external: bool) -> None:
    """Write ONNX Runtime's basic-level optimisation of `model` to `optimized`.

    Basic level only rewrites to standard operators; fused and hardware-specific ones come with the levels above.

    Args:
        source: the file that the user gave, for messages.
        external: write weights to external data beside `optimized`, as models near 2 GB need.

    Raises:
        ModelError: onnxruntime refuses the model.
        RuntimeUnavailableError: onnxruntime is not installed.
        OSError: there is no space for `optimized`.
    """
    version = onnxruntime().__version__
    config = {"optimization.disable_specified_optimizers": ";".join(_DISABLED)}
    if external:
        config["session.optimized_model_external_initializers_file_name"] = f"{optimized.name}.data"
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    try:
        open_session(model, SessionSettings(config=config, optimization="basic", save_optimized_to=optimized))
    except RuntimeUnavailableError as error:
        text = " ".join(str(error.__cause__ or error).split()).replace(str(model), source.name)
        raise ModelError(
            f"{source}: onnxruntime {version} refuses it: {text[:300]}",
            "Run it in onnxruntime where it was exported; if an operator is unknown, use a newer onnxruntime",
        ) from error


def settle(model: ir.Model, before: ir.Model) -> None:
    """Put what ONNX Runtime wrote in order, in place: the producer and metadata of the model `before`, only operator
    sets in use, and weights in the order in which nodes use them, where it writes that of a hash table."""
    _identify_as(model, before)
    _order_initializers(model)


def _identify_as(model: ir.Model, before: ir.Model) -> None:
    model.producer_name, model.producer_version = before.producer_name, before.producer_version
    model.domain, model.model_version, model.doc_string = before.domain, before.model_version, before.doc_string
    model.metadata_props.clear()
    model.metadata_props.update(before.metadata_props)
    used = {node.domain for graph in model.graphs() for node in graph} | {""}
    for domain in [d for d in model.opset_imports if d not in used]:
        del model.opset_imports[domain]


def _order_initializers(model: ir.Model) -> None:
    for graph in model.graphs():
        used = [v.name for node in graph.all_nodes() for v in node.inputs if v is not None and v.is_initializer()]
        rank = {name: position for position, name in reversed(list(enumerate(used)))}
        values = sorted(graph.initializers.values(), key=lambda v: (rank.get(v.name, len(used)), v.name or ""))
        graph.initializers.clear()
        for value in values:
            graph.register_initializer(value)


PREPARED_NAME = "prepared.onnx"
_RUNTIME_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# Of the last level of ONNX Runtime's optimisation, whose models run on the kind of CPU that they were saved on.
_LAYOUT_DOMAINS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
# Of the level before it: layers with their activation, which no quantizer takes.
_FUSED = frozenset({"FusedConv", "FusedGemm", "NhwcFusedConv"})
_LISTED = 8


@dataclass(frozen=True)
class PreparedModel:
    """A model ready for calibration and quantization.

    Attributes:
        model: the prepared model in memory. It is shared: whoever changes it changes a `clone()`. The
            digest stands for it in comparisons.
        path: the same in the work directory, for sessions (`prepared.onnx`, and `prepared.onnx.data` for a large one).
        source: the file that it was made from.
        digest: `edgeq.model.load.model_digest` of `path`; the same source gives the same digest.
        signature: inputs and outputs, named and typed as the source's; shapes may be better known than there.
        notes: what was changed and what is worth knowing, as sentences.
        hazards: tensors that must not be in 8 bits, each with what follows its name in the reason; known once the
            model is calibrated (`edgeq.calibrate.hazards`).
    """

    model: ir.Model = field(compare=False, repr=False)
    path: Path
    source: Path
    digest: str
    signature: Signature
    notes: tuple[str, ...]
    hazards: Mapping[str, str] = field(default_factory=dict, compare=False)


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
    """Load `source` safely and write its prepared form into `workdir`, replacing an earlier one.

    In order: checks; local functions inlined; opset raised to 13 or later; nodes named; 16-bit floats widened to
    float32; Constant nodes, Identity, Dropout and dead code removed; BatchNormalization, and products and sums with
    constants, folded into layers; convolutions of one tensor whose results are added merged; hard sigmoids written as
    one operator; means over images as GlobalAveragePool; ONNX Runtime's basic optimisation; Gemm in a form that can be
    quantized; strided slices joined; shapes inferred; checked again.
    Results are those of the source to float32's accuracy. Names of tensors and nodes that survive are kept, but for
    inner tensors with a name that a quantizer gives to what it makes for another (`edgeq.model.clean`).

    Args:
        loaded: `source` as `read_model` gave it, where it has been read before; it is not changed.
        simplify: False keeps every node that some output depends on: nothing is removed, folded or optimised.
        fix: numbers for free sizes of the inputs, by name; see `edgeq.model.compatibility`.
        inline_limit: bytes of weights above which the prepared model keeps them in external data.

    Raises:
        UsageError: `fix` names a size that is not free.
        ModelError: the model is damaged, already quantized, too old to be raised, or has operators that
            ONNX Runtime does not know.
    """
    notes: list[str] = []
    with progress.stage("Preparing the model", total=4) as advance:
        model = _named(loaded.clone() if loaded is not None else _loaded(source), source, notes)
        if fix:
            fix_sizes(model, fix, source)
            notes.append(f"sizes fixed: {', '.join(f'{name} = {size}' for name, size in fix.items())}")
        external = weight_bytes(model) > inline_limit
        advance(1)
        _rewrite(model, notes, simplify)
        advance(1)
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare.", dir=workdir) as scratch:
            raw, optimized = Path(scratch) / "raw.onnx", Path(scratch) / "optimized.onnx"
            save_model(model, raw, inline_limit=inline_limit)
            if simplify:
                optimize_basic(raw, optimized, source=source, external=external)
            made = ir.load(optimized if simplify else raw)
            if simplify and _is_unfolded(made):
                folded = Path(scratch) / "folded.onnx"
                optimize_basic(optimized, folded, source=source, external=external)
                made = ir.load(folded)
            advance(1)
            finished = _finished(made, model, source, notes, simplify)
            notes.extend(_difference(model, finished))
            path = workdir / PREPARED_NAME
            (workdir / f"{PREPARED_NAME}.data").unlink(missing_ok=True)
            save_model(finished, path, inline_limit=inline_limit)
        advance(1)
    large = len(model_files(path)) > 1
    if large:
        notes.append(f"weights kept in external data ({PREPARED_NAME}.data)")
    signature = signature_of(to_proto(finished), path)
    # The external data of `finished` was in the scratch folder.
    held = read_model(path) if large else finished
    return PreparedModel(held, path, source, model_digest(path), signature, tuple(notes))


def rewritten(prepared: PreparedModel, model: ir.Model, path: Path, *notes: str) -> PreparedModel:
    """`prepared` with another model in its place, which is written to `path`. `model` is not to be changed after it."""
    save_model(model, path)
    return replace(prepared, model=model, path=path, digest=model_digest(path), notes=(*prepared.notes, *notes))


def _loaded(source: Path) -> ir.Model:
    proto = load_model(source, external_data="none")
    signature_of(proto, source)
    return from_proto(proto, data_folder(proto, source), where=source)


def _named(model: ir.Model, source: Path, notes: list[str]) -> ir.Model:
    """The model with functions inlined, opset raised and nodes named."""
    if is_quantized(model):
        raise ModelError(
            f"{source} is quantized already",
            "Give the float32 model that it was made from, or rewrite it with `edgeq retarget`",
        )
    if model.functions:
        notes.append(f"{_count(len(model.functions), 'local function')} inlined")
        inline_functions(model, source)
    _refuse_unknown_domains(model, source)
    opset = opset_of(model)
    model = raise_opset(model, source)
    describe(model, source)
    if opset_of(model) != opset:
        notes.append(f"opset {opset} → {opset_of(model)}")
    fused = sorted({node.op_type for node in every_node(model)} & _FUSED)
    if fused:
        notes.append(
            f"{', '.join(fused)}: ONNX Runtime's optimiser fused these, and they stay in float; give the model as it "
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
                "edgeq takes operators that ONNX Runtime has; export the model without custom operators",
            )


def _rewrite(model: ir.Model, notes: list[str], simplify: bool) -> None:
    """edgeq's own passes, in place."""
    from edgeq.model.clean import forget_origin, remove_no_ops, tidy
    from edgeq.model.fold import fold_batch_norms
    from edgeq.model.products import merge_branches
    from edgeq.model.rewrites import fold_affine, widen_half, write_global_pools, write_hard_sigmoids

    forget_origin(model)
    if dead := tidy(model):
        notes.append(f"{_count(dead, 'node')} removed that no output depends on")
    if widened := widen_half(model):
        notes.append(f"16-bit floats widened to float32 ({_count(widened, 'weight')})")
    if not simplify:
        return
    if removed := remove_no_ops(model):
        what = f"removed that {'does' if removed == 1 else 'do'} nothing"
        notes.append(f"{_count(removed, 'node')} {what} (Identity, Dropout, Cast to the same type, empty Pad)")
    affine = fold_affine(model)
    if folded := fold_batch_norms(model):
        notes.append(f"{folded} BatchNormalization folded")
    if merged := merge_branches(model):
        notes.append(f"{_count(merged, 'sum')} of convolutions of one tensor written as one convolution")
    if affine := affine + fold_affine(model):
        notes.append(f"{_count(affine, 'product or sum', 'products or sums')} with constants folded into layers")
    if pools := write_global_pools(model):
        notes.append(f"{_count(pools, 'mean')} over whole images written as GlobalAveragePool")
    if written := write_hard_sigmoids(model):
        notes.append(f"{_count(written, 'hard sigmoid')} written as one operator")


def _is_unfolded(model: ir.Model) -> bool:
    """Whether a node has nothing but constants to read, as in what ONNX Runtime writes for GroupNormalization: it folds
    constants before it writes functions out."""
    known = GraphIndex(model).computed_constants
    read = ([name_of(value) for value in node.inputs if value is not None] for node in model.graph)
    return any(names and known.issuperset(names) for names in read)


def _finished(model: ir.Model, before: ir.Model, source: Path, notes: list[str], simplify: bool) -> ir.Model:
    """What ONNX Runtime wrote, in edgeq's form, in place: in order, only operator sets in use, shapes everywhere."""
    from edgeq.model.clean import remove_no_ops, tidy
    from edgeq.model.fold import fold_batch_norms
    from edgeq.model.rewrites import join_slices, plain_gemms

    tidy(model)
    if simplify:
        remove_no_ops(model)
        # A MatMul and an Add that ONNX Runtime made one Gemm can take up the BatchNormalization behind it now.
        kept: list[str] = []
        if folded := fold_batch_norms(model, kept):
            notes.append(f"{folded} BatchNormalization folded after ONNX Runtime's optimisation")
        notes.extend(kept)
        if plain := plain_gemms(model):
            notes.append(f"{_count(plain, 'Gemm')} without factors, with one bias for each output")
        if joined := join_slices(model):
            notes.append(f"{_count(joined, 'Concat')} of strided slices written as SpaceToDepth")
        tidy(model)
    if renamed := separate_names(model):
        notes.append(f"{_count(len(renamed), 'tensor')} renamed: quantization gives such names ({_listing(renamed)})")
    settle(model, before)
    name_nodes(model)
    _set_shapes(model, notes)
    _check(model, source)
    return model


def _set_shapes(model: ir.Model, notes: list[str]) -> None:
    if problem := write_shapes(model):
        notes.append(f"symbolic shape inference gave up ({problem}); onnx's own was used")
    unknown = unknown_shapes(model)
    if unknown:
        notes.append(f"{_count(len(unknown), 'tensor')} of unknown shape: {_listing(unknown)}")


def _check(model: ir.Model, source: Path) -> None:
    strange = sorted({n.domain for n in every_node(model)} - _RUNTIME_DOMAINS)
    if strange:
        raise ModelError(
            f"{source}: its preparation brought in operators of {strange[0]!r}", "Please report this model"
        )
    check_valid(skeleton(model), source)


def _difference(before: ir.Model, after: ir.Model) -> list[str]:
    """What ONNX Runtime's optimisation changed, by operator type."""
    old = Counter(n.op_type for n in every_node(before))
    new = Counter(n.op_type for n in every_node(after))
    changed = [f"{op} {old[op]} → {new[op]}" for op in sorted(old | new) if old[op] != new[op]]
    return [f"ONNX Runtime's basic optimisation: {', '.join(changed)}"] if changed else []


def _listing(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


_HANDED_OVER = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8}
)
_LEAST = 1 << 12
"""Bytes of a weight. Smaller ones, and integers that may be a shape or axes, stay in the graph, where shape inference
and constant folding read them."""
_FOLDER = "session.model_external_initializers_file_folder_path"


def open_in_memory(model: ir.Model, settings: SessionSettings | None = None) -> Any:
    """Open an `onnxruntime.InferenceSession` for a model in memory; external data is found where it is.

    Args:
        model: it is not changed.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or refuses the model or the settings.
    """
    settings = settings or SessionSettings()
    folder = external_folder(model)
    if folder is not None:
        settings = replace(settings, config={**settings.config, _FOLDER: str(folder)})
    weights = {name_of(value): np.ascontiguousarray(tensor.numpy()) for value, tensor in _large(model)}
    if weights:
        model = model.clone()
        for value, tensor in _large(model):
            shape = ir.Shape(weights[name_of(value)].shape)
            value.const_value = ir.ExternalTensor(
                "weights", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name_of(value)
            )
    return open_session(to_bytes(model), settings, weights=weights)


def _large(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """The initializers of the main graph that are handed over."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.dtype in _HANDED_OVER and tensor.nbytes >= _LEAST:
            yield value, tensor
