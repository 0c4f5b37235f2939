"""Candidates for models made of matrix products: transformers, recurrent networks, multilayer perceptrons.

Each is a candidate where the model has such layers: outliers smoothed before dynamic quantization, attention fused,
recurrent layers left in float beside a written-out recurrence, static ranges for the products only, and weights in
blocks. The search measures them; nothing is decided here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from edgeq.backends import backend_named
from edgeq.calibrate.collect import collect
from edgeq.calibrate.hazards import calibrated
from edgeq.calibrate.ranges import Range, scheme_ranges
from edgeq.data.samples import Samples
from edgeq.errors import UsageError
from edgeq.graph.query import is_constant, is_op
from edgeq.hardware.target import Target
from edgeq.model.load import model_digest, read_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.pipeline.job import Built, Job
from edgeq.progress import Progress
from edgeq.scheme import ALL_NODES, SYMMETRIC_BLOCKS, Scheme
from edgeq.tune.candidate import Candidate
from edgeq.tune.recover.fuse_attention import fuse_attention, may_have_attention
from edgeq.tune.recover.methods.smoothquant import SmoothQuant, product_groups, smooth
from edgeq.tune.recover.methods.weight_rounding import WeightRounding

NAME = "sequence"
"""What `Candidate.builder` has of candidates that `build_sequence` builds."""
LEAST_SHARE = 0.5
"""Of the multiply-accumulates, in constant matrices and recurrent layers: below it, these candidates are not tried."""
_FUSE, _SMOOTH, _ROUND = "fuse-attention", SmoothQuant.name, WeightRounding.name
_PRODUCTS = ("Gemm", "MatMul")
_RECURRENT = ("GRU", "LSTM", "RNN")
# 8 bits bear long blocks, which are faster; 4 bits need short ones.
_BLOCKS = {8: 128, 4: 32}


def sequence_candidates(job: Job, target: Target) -> tuple[Candidate, ...]:
    """Those worth trying for the model; empty where it is not made of matrix products."""
    profile = target.profile.scheme
    model = job.prepared.model
    if target.backend != "cpu" or not profile.dynamic_weight_types or product_share(model) < LEAST_SHARE:
        return ()
    found = _variants(model, profile, sampled=job.calibration is not None)
    # Weights in blocks are a mode of the backend's own.
    return tuple(
        Candidate(name, scheme, recoveries, builder="" if scheme.mode == "weight-only" else NAME)
        for name, scheme, recoveries in found
    )


def build_sequence(job: Job, target: Target, candidate: Candidate, destination: Path, progress: Progress) -> Built:
    """Write the model of a candidate whose `builder` is `NAME` to `destination`.

    Raises:
        EdgeqError: it cannot be built; the search drops it with that reason.
    """
    scheme, prepared = candidate.scheme, job.prepared
    for position, recovery in enumerate(candidate.recoveries):
        if job.calibration is None:
            raise UsageError(f"{recovery} needs calibration samples", "Give them with --data")
        prefix = "-".join(candidate.recoveries[: position + 1])
        prepared = _transformed(recovery, prepared, job.calibration, f"{prefix}-{scheme.mode}", scheme, progress)
    ranges: dict[str, Range] = {}
    if scheme.mode == "static":
        assert job.calibration is not None
        found = collect(prepared.model, job.calibration, model_digest=prepared.digest, progress=progress)
        ranges = scheme_ranges(found, scheme)
        prepared = calibrated(prepared, found)
    backend = backend_named(target.backend)
    return Built(target, backend.build(prepared, ranges, scheme, destination, samples=job.calibration), ranges)


def product_share(model: ir.Model) -> float:
    """Share of the multiply-accumulates, 0 to 1, in products with constant matrices and in recurrent layers."""
    macs = node_macs(model)
    ours = sum(
        macs.get(node.name or "", 0)
        for node in model.graph
        if is_op(node, *_RECURRENT) or (is_op(node, *_PRODUCTS) and is_constant(node.inputs[1]))
    )
    return ours / max(1, sum(macs.values()))


def _variants(model: ir.Model, profile: Scheme, *, sampled: bool) -> Iterator[tuple[str, Scheme, tuple[str, ...]]]:
    dynamic = profile.replace(mode="dynamic")
    types = {node.op_type for node in model.graph}
    groups = product_groups(model)
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
        yield "static products, smoothed", _products_only(model, profile), (_SMOOTH,)
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


def _products_only(model: ir.Model, profile: Scheme) -> Scheme:
    """Static ranges for products with constant matrices; tables are stored as integers."""
    of_activations = [
        node.name or "" for node in model.graph if is_op(node, *_PRODUCTS) and not is_constant(node.inputs[1])
    ]
    return profile.replace(
        op_types=_PRODUCTS,
        exclude=(*profile.exclude, *of_activations),
        stored_types=(*profile.stored_types, "Gather", *_RECURRENT),
    )


def _transformed(
    recovery: str, prepared: PreparedModel, samples: Samples, name: str, scheme: Scheme, progress: Progress
) -> PreparedModel:
    """The model after a recovery, kept beside the prepared one: several candidates start from it."""
    folder = prepared.path.parent / f"{name}-{prepared.digest[:16]}"
    kept = folder / "model.onnx"
    if not kept.is_file():
        draft = folder.with_name(f"{folder.name}.draft")
        draft.mkdir(exist_ok=True)
        if recovery == _SMOOTH:
            made, _ = smooth(
                prepared,
                samples,
                draft / kept.name,
                symmetric=scheme.activation_symmetric,
                exclude=scheme.exclude,
                progress=progress,
            )
        else:
            made, _ = fuse_attention(prepared, samples, draft / kept.name)
        if made is prepared:
            raise UsageError(f"{recovery} finds nothing to do in this model")
        draft.rename(folder)
    return dataclasses.replace(prepared, model=read_model(kept), path=kept, digest=model_digest(kept))
