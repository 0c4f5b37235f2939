"""A comparison layer by layer, for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from edgeq.cli._common import Lines, styled, table
from edgeq.cli._proof import closeness

if TYPE_CHECKING:
    from edgeq.measure.debug import Diagnosis

# The bar of a layer's own error: empty at this SQNR or better, full at 0 dB.
_CLEAN_DB = 50.0
_BAR = 10
_WEIGHTS_SHOWN = 5
_FIGURES, _LEAST_NAME, _WEIGHT_NAME = 90, 16, 40
_LEAST_SHARE = 0.0001


def draw_diagnosis(found: Diagnosis, *, verbose: bool) -> Lines:
    """Outputs first, then the error sources, then the layers in the order in which they run."""
    variant = f", variant {found.variant}" if found.variant else ""
    yield f"{found.quantized}{variant} against {found.float_model}, {found.comparison.count} samples"
    yield from (f"note: {note}" for note in found.notes)
    yield f"outputs: {closeness(found.optimised)} in the optimised session,"
    yield f"         {closeness(found.written)} on the graph as written"
    style = {"healthy": "green", "noisy": "yellow", "poor": "red"}[found.verdict]
    yield styled(f"verdict: {found.verdict_text}", style)
    yield from _draw_error_sources(found)
    yield from _draw_exclusions(found)
    yield from _draw_layers(found, verbose=verbose)
    yield from _draw_weights(found, verbose=verbose)
    yield from _draw_engine(found, verbose=verbose)
    yield from (styled(f"warning: {warning}", "yellow") for warning in found.warnings)


def _draw_error_sources(found: Diagnosis) -> Lines:
    if not found.error_sources:
        yield ""
        yield "no layer stands out: the noise comes from many alike"
        return
    what = (
        "layers with the largest part in what error there is"
        if found.verdict == "healthy"
        else "layers that cause the error"
    )
    yield ""
    yield f"{what}, each with the outputs' SQNR with its error alone"
    for rank, error_source in enumerate(found.error_sources, 1):
        who = f"{error_source.node} ({error_source.op_type})" if error_source.node else f"input {error_source.name}"
        yield (f"{rank:3}. {who}: {_db(error_source.output_sqnr_db)} dB; {error_source.cause}: {error_source.reason}")
        yield f"     {_flags(error_source.exclude)}"
    if len(found.error_sources) > 1:
        yield f"all of them: {_flags(found.exclude)}"


def _draw_exclusions(found: Diagnosis) -> Lines:
    """The nodes that help most in float, and the one that helps most by itself."""
    from edgeq.measure.agreement import HEALTHY_DB

    if found.verdict == "healthy":
        return
    yield ""
    if not found.exclusions:
        yield f"none of them helps in float; `edgeq quantize --min-sqnr {HEALTHY_DB:g}` tries sets of other nodes"
        return
    yield "what helps in float, computed so with the rest as it is"
    single = next((one for one in found.exclusions if len(one.nodes) == 1), None)
    for one in dict.fromkeys(filter(None, (found.exclusions[0], single))):
        yield f"  {_db(one.plain_db)} → {_db(one.sqnr_db)} dB: {_flags(one.nodes)}"


def _draw_layers(found: Diagnosis, *, verbose: bool) -> Lines:
    from rich.console import Console
    from rich.table import Column, Table

    from edgeq.measure.agreement import worst_db
    from edgeq.report.numbers import shorten

    ranks = {error_source.name: rank for rank, error_source in enumerate(found.error_sources, 1)}
    # What the figures leave of the line; rich cuts at the end, where names differ.
    width = max(_LEAST_NAME, (Console().width - _FIGURES) // 2)
    activations = found.comparison.activations
    shown = {id(a) for a in sorted(activations, key=lambda a: -a.noise.own)[: found.worst]}
    title = "layers in execution order (SQNR in dB)" if verbose else "worst layers in execution order (SQNR in dB)"
    tensor, layer = (Column(head, overflow="fold") for head in ("tensor", "layer"))
    layers = Table("", tensor, layer, "all so far", "alone", "", "rounding", "outside", "outputs", title=title)
    for activation in activations:
        if not verbose and id(activation) not in shown and activation.name not in ranks:
            continue
        operator = activation.op_type + (f"+{activation.folded}" if activation.folded else "")
        layers.add_row(
            str(ranks.get(activation.name, "")),
            shorten(activation.name, width),
            f"{shorten(activation.node, width)} {operator}".strip(),
            _db(activation.accumulated.sqnr_db),
            _db(activation.layer.sqnr_db),
            _bar(activation.layer.sqnr_db),
            _db(activation.rounding.sqnr_db) if activation.rounding else activation.kind,
            _share(activation.saturated_low + activation.saturated_high),
            _db(worst_db(activation.effect)) if activation.effect is not None else "",
        )
    yield layers
    if not verbose and len(shown) < len(activations):
        yield f"{len(activations)} tensors were compared (-v shows all)"


def _draw_weights(found: Diagnosis, *, verbose: bool) -> Lines:
    from edgeq.report.numbers import shorten

    weights = [w for w in found.comparison.weights if verbose or len(w.shape) > 1]
    chosen = weights if verbose else sorted(weights, key=lambda w: w.sqnr_db)[:_WEIGHTS_SHOWN]
    if not chosen:
        return
    heads = ("weight", "layer", "SQNR dB", "worst channels", "bits")
    rows = (
        (
            shorten(weight.name, _WEIGHT_NAME),
            shorten(weight.node, _WEIGHT_NAME),
            _db(weight.sqnr_db),
            ", ".join(f"{channel}: {_db(db)}" for channel, db in weight.worst_channels),
            f"{weight.bits} {'per channel' if weight.per_channel else 'per tensor'}",
        )
        for weight in chosen
    )
    yield table(heads, rows, title="weights" if verbose else "worst weights")


def _draw_engine(found: Diagnosis, *, verbose: bool) -> Lines:
    """Where an engine's answers part from those of the CPU's kernels."""
    from edgeq.report.numbers import shorten

    if not found.engine_name:
        return
    worst = {id(layer) for layer in sorted(found.engine, key=lambda layer: -layer.lost_db)[: found.worst]}
    title = f"{found.engine_name} against onnxruntime's CPU kernels (SQNR in dB), the same file"
    rows = []
    for layer in found.engine:
        if verbose or id(layer) in worst:
            alone = "" if layer.alone_db is None else _db(layer.alone_db)
            name, node = (shorten(text, _WEIGHT_NAME) for text in (layer.name, layer.node))
            figures = (_db(layer.sqnr_db), _db(layer.inputs_db), alone, f"{layer.steps:.1f}")
            rows.append((name, f"{node} {layer.op_type}".strip(), *figures))
    yield table(("tensor", "layer", "all so far", "what it reads", "alone", "steps"), rows, title=title)


def _flags(nodes: tuple[str, ...]) -> str:
    import shlex

    return " ".join(f"--exclude {shlex.quote(node)}" for node in nodes) or "(no node to exclude)"


def _db(value: float) -> str:
    if math.isinf(value):
        return "exact" if value > 0 else "-inf"
    return f"{value:.1f}"


def _bar(sqnr: float) -> str:
    filled = round(_BAR * min(1.0, max(0.0, 1 - sqnr / _CLEAN_DB))) if sqnr < math.inf else 0
    return "█" * filled + "·" * (_BAR - filled)


def _share(value: float) -> str:
    return f"{value:.2%}" if value >= _LEAST_SHARE else "< 0.01%" if value else ""
