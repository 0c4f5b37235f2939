"""Define the search space: the profile's own choice first, then what its [search] table allows, one coordinate at a
time.

A kernel choice is everything that decides speed: dtypes, weight granularity, format, session options. A calibration
method only moves scales and costs nothing at run time. So edgeq tries all kernel choices with just the profile's
method, and other methods only for the kernel choices that are worth it. The number of builds is then a sum, not a
product.

Models made of matrix products (transformers, recurrent networks, multilayer perceptrons) get further candidates, if
they have suitable layers:

- outliers smoothed before dynamic quantization
- fused attention
- recurrent layers left in float, besides a candidate in which they are written out in integers
- static ranges for the products only
- weights in blocks

The search measures all candidates; this module decides nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.backends.base import backend_named
from edgeq.calibration.hazards import with_hazards
from edgeq.calibration.methods import REGISTRY
from edgeq.calibration.ranges import Range, scheme_ranges
from edgeq.calibration.rescaled import derive_statistics
from edgeq.data.samples import Samples
from edgeq.errors import UsageError
from edgeq.hardware.profile import Profile
from edgeq.hardware.target import Target
from edgeq.model.digests import model_digest
from edgeq.model.graph import GraphIndex, is_constant, is_op
from edgeq.model.load import read_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.prove.job import Built, DerivedValues, Job, build_derived
from edgeq.run.engines import DEFAULT, EngineChoice
from edgeq.scheme import ALL_NODES, SYMMETRIC_BLOCKS, Scheme
from edgeq.tuning.recover.fuse_attention import fuse_attention, may_have_attention
from edgeq.tuning.recover.methods.smoothquant import SmoothQuant, find_product_groups, smooth
from edgeq.tuning.recover.methods.weight_rounding import WeightRounding
from edgeq.util.display import Progress


@dataclass(frozen=True)
class Candidate:
    """Describe a candidate that tuning builds and measures.

    Attributes:
        name: a short name, unique in a run, and the same in every run on the same input.
        scheme: how to quantize.
        recoveries: names of accuracy recoveries, in the order in which they are applied.
        threads: threads inside an operator; 0 lets ONNX Runtime use all cores.
        builder: what builds the candidate: "" means the target's backend, "sequence" means `edgeq.tuning.space`.
        engine: the engine that runs it; None means onnxruntime's own kernels.
    """

    name: str
    scheme: Scheme
    recoveries: tuple[str, ...] = ()
    threads: int = 0
    builder: str = ""
    engine: EngineChoice | None = None

    @property
    def quantized(self) -> bool:
        """Return whether the candidate is quantized, and not just the float model in another engine."""
        return self.scheme.mode != "float"

    def replace(self, **changes: Any) -> Candidate:
        """Return a copy with `changes`."""
        return dataclasses.replace(self, **changes)


def engine_name(candidate: Candidate) -> str:
    """Return the name of the engine that runs the candidate."""
    return candidate.engine.engine.name if candidate.engine else DEFAULT


SEQUENCE_BUILDER = "sequence"
"""The `Candidate.builder` of candidates that `build_sequence` builds."""
WORTH_A_TRY = 0.5
"""Candidates for certain layers (constant matrices and recurrent layers, or layers that can be quantized at run time)
are tried if these layers have at least this share of the multiply-accumulates.
"""
_FUSE, _SMOOTH, _ROUND = "fuse-attention", SmoothQuant.name, WeightRounding.name
_PRODUCTS = ("Gemm", "MatMul")
_RECURRENT = ("GRU", "LSTM", "RNN")
# 8-bit weights stay accurate with long blocks, which are faster. 4-bit weights need short blocks.
_BLOCKS = {8: 128, 4: 32}


def sequence_candidates(job: Job, target: Target) -> tuple[Candidate, ...]:
    """Return the candidates that are worth trying for a model made of matrix products; empty for other models."""
    profile = target.profile.scheme
    model = job.prepared.model
    # The target's kernels must be able to compute ranges at run time, or none of these candidates would run.
    dynamic = profile.dynamic_weight_types and "dynamic" in backend_named(target.backend).modes
    if not dynamic or product_share(model) < WORTH_A_TRY:
        return ()
    variants = _list_variants(model, profile, sampled=job.calibration is not None)
    # The backend itself has a mode for weights in blocks.
    return tuple(
        Candidate(name, scheme, recoveries, builder="" if scheme.mode == "weight-only" else SEQUENCE_BUILDER)
        for name, scheme, recoveries in variants
    )


def build_sequence(job: Job, target: Target, candidate: Candidate, destination: Path, progress: Progress) -> Built:
    """Write the model of a candidate whose `builder` is `SEQUENCE_BUILDER` to `destination`.

    Raises:
        EdgeqError: the candidate cannot be built. The search then drops it for this reason.
    """
    scheme, prepared = candidate.scheme, job.prepared
    for position, recovery in enumerate(candidate.recoveries):
        if job.calibration is None:
            raise UsageError(f"{recovery} needs calibration samples", "Give them with ⟨data⟩")
        # The name contains all recoveries so far, so candidates share the models of a common beginning.
        prefix = "-".join(candidate.recoveries[: position + 1])
        prepared = _apply_recovery(recovery, prepared, job.calibration, f"{prefix}-{scheme.mode}", scheme, progress)
    ranges: dict[str, Range] = {}
    if scheme.mode == "static":
        assert job.calibration is not None
        assert job.statistics is not None
        statistics = derive_statistics(job.statistics, job.prepared, prepared, None, job.calibration, progress=progress)
        ranges = scheme_ranges(statistics, scheme)
        prepared = with_hazards(prepared, statistics)
    return build_derived(replace(job, prepared=prepared), target, scheme, DerivedValues(ranges), destination)


def product_share(model: ir.Model) -> float:
    """Return the share (0 to 1) of multiply-accumulates in products with constant matrices and in recurrent layers."""
    macs = node_macs(model)
    ours = sum(
        macs.get(node.name or "", 0)
        for node in model.graph
        if is_op(node, *_RECURRENT) or (is_op(node, *_PRODUCTS) and is_constant(node.inputs[1]))
    )
    return ours / max(1, sum(macs.values()))


def _list_variants(model: ir.Model, profile: Scheme, *, sampled: bool) -> Iterator[tuple[str, Scheme, tuple[str, ...]]]:
    dynamic = profile.replace(mode="dynamic")
    types = {node.op_type for node in model.graph}
    groups = find_product_groups(model)
    if "GRU" in types and "GRU" in dynamic.dynamic_weight_types:
        remaining = {t: w for t, w in dynamic.dynamic_weight_types.items() if t != "GRU"}
        stored = (*dynamic.stored_types, "GRU")
        yield "dynamic, GRU in float", dynamic.replace(dynamic_weight_types=remaining, stored_types=stored), ()
    if groups and sampled:
        yield "dynamic, smoothed", dynamic, (_SMOOTH,)
    if sampled and may_have_attention(model):
        yield "dynamic, attention fused", dynamic, (_FUSE,)
        yield "dynamic, attention fused, smoothed", dynamic, (_FUSE, _SMOOTH)
    if groups and sampled and profile.mode == "static":
        yield "static products, smoothed", _quantize_products_only(model, profile), (_SMOOTH,)
    if groups:
        for bits, block in _BLOCKS.items():
            blocks = {"weight_bits": bits, "block_size": block, "weight_symmetric": SYMMETRIC_BLOCKS[bits]}
            scheme = profile.replace(mode="weight-only", **blocks)
            computes = {"": scheme}
            if bits < 8:
                computes[", float compute"] = scheme.replace(float_compute=(ALL_NODES,))
            for text, computing in computes.items():
                yield f"weight-only {bits} bits{text}", computing, ()
                if sampled and bits < 8:
                    yield f"weight-only {bits} bits{text}, rounded", computing, (_ROUND,)


def _quantize_products_only(model: ir.Model, profile: Scheme) -> Scheme:
    """Return a scheme with static ranges for products with constant matrices, and for nothing else. Embedding tables
    and the weights of recurrent layers are stored as integers.
    """
    of_activations = [
        node.name or "" for node in model.graph if is_op(node, *_PRODUCTS) and not is_constant(node.inputs[1])
    ]
    scheme = profile.keep_in_float(of_activations, "it multiplies two activations, whose ranges vary more than weights")
    return scheme.replace(op_types=_PRODUCTS, stored_types=(*profile.stored_types, "Gather", *_RECURRENT))


def _apply_recovery(
    recovery: str, prepared: PreparedModel, samples: Samples, name: str, scheme: Scheme, progress: Progress
) -> PreparedModel:
    """Return the model after a recovery. The new model is kept next to the prepared model, because several candidates
    use it.
    """
    folder = prepared.path.parent / f"{name}-{prepared.digest[:16]}"
    path = folder / "model.onnx"
    if not path.is_file():
        # Write beside the final place and rename, so that a killed run leaves no half-written model to be reused.
        draft = folder.with_name(f"{folder.name}.draft")
        draft.mkdir(exist_ok=True)
        if recovery == _SMOOTH:
            transformed = smooth(prepared, samples, draft / path.name, scheme, progress=progress).prepared
        else:
            transformed, _ = fuse_attention(prepared, samples, draft / path.name)
        if transformed is prepared:
            raise UsageError(f"{recovery} finds nothing to do in this model")
        draft.rename(folder)
    return dataclasses.replace(prepared, graph=GraphIndex(read_model(path), path), path=path, digest=model_digest(path))


_SLOWER_REASON = "kept in float because it takes longer in int8"
_RANGE_FIELDS = frozenset({"method", "method_options"})
_DYNAMIC = "dynamic"


def kernel_candidates(profile: Profile, *, static: bool = True, dynamic: bool = False) -> tuple[Candidate, ...]:
    """Return the profile's scheme, and every other kernel choice of its search table that makes sense.

    Args:
        static: whether there are statistics to derive ranges from.
        dynamic: whether to try ranges measured at run time, because the model has matrix products of activations.
    """
    candidates: dict[str, Candidate] = {}
    if static:
        for scheme in _kernel_schemes(profile):
            candidate = Candidate(_name_scheme(scheme), scheme)
            candidates.setdefault(candidate.name, candidate)
    # Only granularity matters here: a dynamic scheme has no ranges and no format to choose.
    if dynamic and profile.scheme.dynamic_weight_types:
        for per_channel in dict.fromkeys((profile.scheme.per_channel, *profile.search.get("per_channel", ()))):
            scheme = profile.scheme.replace(mode=_DYNAMIC, per_channel=per_channel)
            candidate = Candidate(_name_scheme(scheme), scheme)
            candidates.setdefault(candidate.name, candidate)
    return tuple(candidates.values())


def method_candidates(candidate: Candidate, profile: Profile) -> tuple[Candidate, ...]:
    """Return `candidate` with each of the other calibration methods in the profile's search table; empty if `candidate`
    is dynamic.
    """
    if candidate.scheme.mode != "static" or candidate.builder:
        return ()
    candidates: dict[str, Candidate] = {}
    for method in profile.search.get("method", ()):
        for options in REGISTRY.load(method).search:
            scheme = candidate.scheme.replace(method=method, method_options=options)
            variant = with_scheme(candidate, scheme)
            if variant.name != candidate.name:
                candidates.setdefault(variant.name, variant)
    return tuple(candidates.values())


def in_float(candidate: Candidate, nodes: Iterable[str]) -> Candidate:
    """Return `candidate` with `nodes` left in float as well."""
    return with_scheme(candidate, candidate.scheme.keep_in_float(nodes, _SLOWER_REASON))


def in_engine(candidate: Candidate, choice: EngineChoice) -> Candidate:
    """Return `candidate`, run by `choice`."""
    return candidate.replace(name=f"{candidate.name} in {choice.name}", engine=choice)


def with_scheme(candidate: Candidate, scheme: Scheme) -> Candidate:
    """Return `candidate` with another scheme, and with a name made from that scheme."""
    variant = candidate.replace(name=_name_scheme(scheme), scheme=scheme)
    return in_engine(variant, candidate.engine) if candidate.engine else variant


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts that are worth comparing on a machine with this number of cores: all (0), half, one."""
    return (0,) if cores < 2 else tuple(dict.fromkeys((0, cores // 2, 1)))


def _kernel_schemes(profile: Profile) -> Iterator[Scheme]:
    yield profile.scheme
    axes: list[list[Mapping[str, Any]]] = []
    for field, values in sorted(profile.search.items()):
        if field not in _RANGE_FIELDS and field != "session_options":
            axes.append([{field: value} for value in values])
    for option, values in sorted(profile.search.get("session_options", {}).items()):
        axes.append([{"session_options": {option: value}} for value in values])
    for choice in itertools.product(*axes):
        changes: dict[str, Any] = {}
        session = dict(profile.scheme.session_options)
        for part in choice:
            session.update(part.get("session_options", {}))
            changes.update({k: v for k, v in part.items() if k != "session_options"})
        scheme = profile.scheme.replace(**changes, session_options=_drop_defaults(session))
        if _is_sensible(scheme, profile):
            yield scheme


def _drop_defaults(session: Mapping[str, str]) -> dict[str, str]:
    # "0" is the default of these switches. It is left out, so that equal schemes get the same name.
    return {key: value for key, value in session.items() if value != "0"}


def _is_sensible(scheme: Scheme, profile: Profile) -> bool:
    """Return whether a scheme makes sense: it must not mitigate saturation if nothing saturates, or mitigate it in two
    ways at once.
    """
    saturating = profile.hazards.get("saturates_int16", ())
    saturates = scheme.pair in saturating or f"{scheme.pair}-{scheme.format}" in saturating
    precise = bool(scheme.session_options)
    # Without saturation, a remedy only costs speed or precision. The profile's own choice is allowed all the same.
    if not saturates:
        return not (precise or scheme.fit_pairs) and scheme.reduce_range == (
            profile.scheme.reduce_range and scheme.pair == profile.scheme.pair
        )
    return sum((precise, scheme.reduce_range, scheme.fit_pairs)) <= 1


def _name_scheme(scheme: Scheme) -> str:
    """Return a name that distinguishes a scheme from the others of a run: "U8S8 per-channel, percentile 99.99"."""
    if scheme.mode == _DYNAMIC:
        return "dynamic per-channel" if scheme.per_channel else "dynamic per-tensor"
    parts = [scheme.pair, "per-channel" if scheme.per_channel else "per-tensor"]
    if scheme.format != "QDQ":
        parts.insert(0, scheme.format)
    if scheme.activation_symmetric:
        parts.append("symmetric")
    if not scheme.weight_symmetric:
        parts.append("asymmetric-weights")
    if scheme.scale != "any":
        parts.append(scheme.scale)
    if scheme.reduce_range:
        parts.append("7-bit")
    if scheme.fit_pairs:
        parts.append("fitted")
    if scheme.wide:
        parts.append("on 16 bits" if ALL_NODES in scheme.wide else f"({len(scheme.wide)} on 16 bits)")
    parts += [f"{key.rpartition('.')[2]}={value}" for key, value in sorted(scheme.session_options.items())]
    method = [scheme.method, *(f"{value:g}" for value in scheme.method_options.values())]
    # Only their number: the names of many layers would make the name unreadable.
    if scheme.exclude:
        method.append(f"({len(scheme.exclude)} in float)")
    return f"{' '.join(parts)}, {' '.join(method)}"
