"""A proof, for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edgeq.cli._common import Lines, styled, table

if TYPE_CHECKING:
    from edgeq.jobs.proof import Proof
    from edgeq.jobs.saturation import Decision
    from edgeq.measure.agreement import Agreement, OutputAgreement

_FLOAT_NODES_SHOWN = 8
_OUTPUTS_SHOWN = 4


def draw_proof(proof: Proof, *, verbose: bool) -> Lines:
    """Coverage, agreement, accuracy, speed and warnings."""
    from edgeq_device.claim import SLOWER

    from edgeq.run.engines import DEFAULT

    coverage, agreement = proof.coverage, proof.agreement
    yield f"int8 coverage {coverage.summary()}"
    if coverage.reason:
        yield f"  not measured: {coverage.reason}"
    nodes = sorted(coverage.float_nodes, key=lambda node: -node.macs)
    for node in nodes if verbose else nodes[:_FLOAT_NODES_SHOWN]:
        yield f"  {node.precision or 'float'}: {node.name} ({node.op_type}, {node.macs:,} MACs): {node.reason}"
    if not verbose and len(nodes) > _FLOAT_NODES_SHOWN:
        yield f"  and {len(nodes) - _FLOAT_NODES_SHOWN} more (-v shows them)"
    in_engine = "" if proof.engine == DEFAULT else f"in {proof.engine}, "
    yield f"{in_engine}against float32: {closeness(agreement)} ({proof.samples} samples)"
    if len(agreement.outputs) > 1:
        outputs = sorted(agreement.outputs, key=lambda output: output.least_db)
        for output in outputs if verbose else outputs[:_OUTPUTS_SHOWN]:
            yield f"  output {output.name}: {closeness(output)}"
    for output in agreement.outputs:
        parts = sorted(output.slices, key=lambda part: part.sqnr_db)
        for part in parts if verbose else parts[:_OUTPUTS_SHOWN]:
            figures = (
                "the same" if part.sqnr_db == math.inf else f"SQNR {part.sqnr_db:.1f} dB, cosine {part.cosine:.5f}"
            )
            yield f"  output {output.name}, {part.where}: {figures}"
    if proof.accuracy:
        rows = ((name, *(f"{value:.4f}" for value in one.metrics.values())) for name, one in proof.accuracy.items())
        yield table(("", *next(iter(proof.accuracy.values())).metrics), rows)
    if proof.speed is not None and proof.speed.ratio.verdict != SLOWER:  # a warning says that
        yield proof.speed.ratio.sentence("int8", "float32")
    yield from (styled(f"warning: {warning}", "yellow") for warning in proof.warnings())


def closeness(found: Agreement | OutputAgreement) -> str:
    """How closely outputs follow others: by the share that is equal where they are indices, the same top-1
    where they are class scores, else by their cosine."""
    if not found.compared:
        return "nothing could be compared"
    if found.same is not None:
        return f"{found.same:.1%} of the values the same"
    if found.sqnr_db == math.inf:
        return "the same"
    second = f"cosine {found.cosine:.5f}" if found.top1 is None else f"same top-1 in {found.top1:.1%}"
    return f"SQNR {found.sqnr_db:.1f} dB, {second}"


def draw_decision(decision: Decision, *, verbose: bool) -> Lines:
    """What was done about saturating kernels, and at what price."""
    yield f"16-bit sums: {decision.why}"
    if not verbose:
        return
    metric = "" if decision.exact_metric is None else f", {decision.exact_metric:.4f}"
    yield f"  exact kernels: {decision.exact_db:.1f} dB{metric}"
    for mitigation in decision.mitigations:
        if mitigation.failed:
            yield f"  {mitigation.name}: cannot be built: {mitigation.failed}"
            continue
        metric = "" if mitigation.metric is None else f", {mitigation.metric:.4f}"
        safe = "" if mitigation.safe else ", can saturate"
        yield f"  {mitigation.name}: {mitigation.sqnr_db:.1f} dB{metric}, time x{mitigation.cost:g}{safe}"
