"""`edgeq.retarget`: a quantized model in, the same model in another format or other integer types out, compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from edgeq_device.select import WrongKernels, known_wrong

from edgeq.backends.cpu import settle
from edgeq.errors import ModelError, UsageError
from edgeq.hardware.target import Target, resolve
from edgeq.model.clean import check_model_name, name_nodes, remove_no_ops, tidy
from edgeq.model.edit import from_proto, to_proto
from edgeq.model.fold import LOWEST, raise_opset
from edgeq.model.graph import bodies, opset_of
from edgeq.model.load import (
    check_valid,
    data_beside,
    data_name,
    is_quantized,
    load_model,
    model_files,
    path_of,
    save_model,
)
from edgeq.model.products import integer_products
from edgeq.model.shapes import write_shapes
from edgeq.retarget.compare import USUAL, Comparison, check_target, compare, optimiser_problem
from edgeq.retarget.read import Form, check_form, is_integer_operator, normalise, read_form
from edgeq.retarget.shift import INTEGERS, limit_weights, shift_activations, shift_weights
from edgeq.retarget.write import to_qdq, to_qoperator
from edgeq.util.display import Displayed
from edgeq.util.outputs import check_apart, output_file

FORMATS = ("QDQ", "QOperator")


@dataclass(frozen=True)
class Retargeted(Displayed):
    """What `retarget` did.

    Attributes:
        before, after: the forms of both models.
        changes: what was done, a phrase each.
        kept: what stayed as it was, and why.
        comparison: both models on noise; None where they do not run on made-up inputs.
        session_options: to set when the new model is run on ONNX Runtime's CPU kernels, or it may be less accurate.
    """

    output: Path
    before: Form
    after: Form
    changes: tuple[str, ...]
    kept: tuple[str, ...]
    comparison: Comparison | None
    session_options: Mapping[str, str]

    def __record__(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "before": self.before,
            "after": self.after,
            "changes": self.changes,
            "kept": self.kept,
            "identical": self.comparison.identical if self.comparison is not None else None,
            "largest_difference": self.comparison.largest if self.comparison is not None else None,
            "session_options": self.session_options,
        }


def retarget(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    target: str | Path | None = None,
    format: str | None = None,
    activation_type: str | None = None,
    weight_type: str | None = None,
    wanted: Callable[[ir.Node], bool] = lambda node: True,
    force: bool = False,
) -> Retargeted:
    """Rewrite a quantized model for another runtime; its scales and the numbers it stands for stay.

    Args:
        model: a model with QuantizeLinear and DequantizeLinear (from training in PyTorch or TensorFlow, or any tool) or
            with QLinear operators.
        target: "auto" (this machine), a profile, a target or a .toml file, whose format and integer types are taken
            where none are named. None leaves what is not named as it is.
        format: "QDQ" or "QOperator".
        activation_type, weight_type: "int8" or "uint8".
        wanted: to QOperator: which operators to rewrite.
        force: replace what is at `output`.

    Raises:
        UsageError: an unknown format or type, or int8 activations with uint8 weights.
        ModelError: not quantized, quantized dynamically, or damaged; or with zero points or scales that kernels of
            `target` do not take.
        CheckFailedError: only types were to change, and the new model's outputs differ; or it does not run. Nothing is
            written then.
    """
    model, output = path_of(model), path_of(output, "output")
    place = resolve(target) if target is not None else None
    if place is not None:
        scheme = place.profile.scheme
        format = format or scheme.format
        activation_type = activation_type or scheme.activation_type
        weight_type = weight_type or scheme.weight_type
    _check_request(format, activation_type, weight_type)
    check_model_name(output)
    for written in (output, output.with_name(data_name(output))):
        check_apart(written, model_files(model))
    with output_file(output, force=force, beside=data_beside(output, model)) as draft:
        graph, changes = _opened(model)
        before = read_form(graph)
        if before.format == "dynamic" or not before.activations:
            raise ModelError(
                f"{model} has no 8-bit activations with constant scales"
                + (", only dynamic quantization" if before.format == "dynamic" else ""),
                "It runs as it is; for another runtime type `edgeq quantize FLOAT.onnx --dynamic -o OUT.onnx`, or with "
                "--data SAMPLES instead of --dynamic",
            )
        kept = _rewrite(graph, before, changes, format, activation_type, weight_type, wanted)
        tidy(graph)
        graph.graph.sort()
        after = read_form(graph)
        name_nodes(graph)
        check_valid(to_proto(graph), output)
        session_options, why, _ = settle(graph)
        if place is not None:
            check_target(graph, place, model, before)
            changes += _limit(graph, place)
        save_model(graph, draft)
        same_operators = format is None and before.format == "QDQ"
        branches = any(True for node in graph.graph for _ in bodies(node))
        comparison = compare(model, draft, same_operators=same_operators, branches=branches)
        problem = optimiser_problem(model, draft, branches=branches)
        if problem:
            kept.append(f"ONNX Runtime's optimiser has to be off: {problem}")
        if comparison is None:
            kept.append("not compared on noise: the model does not run on made-up inputs")
        elif comparison.largest > USUAL:
            kept.append(
                f"outputs on noise differ by {comparison.largest:.0%} of the largest: this model makes much of single "
                "steps; compare both on data of yours (`edgeq compare`)"
            )
    return Retargeted(output, before, after, tuple(changes), (*kept, *why), comparison, session_options)


def _limit(graph: ir.Model, target: Target) -> list[str]:
    """Make weights smaller, in place, where releases that the target has, or may have, compute wrongly otherwise; a
    line for each reason that was one."""
    lines = []
    for row in _limits(graph, target):
        count = limit_weights(graph, row.weight_limit)
        if count:
            lines.append(f"{count} weights below -{row.weight_limit} → -{row.weight_limit}: {row.what} ({row.source})")
    return lines


def _limits(graph: ir.Model, target: Target) -> list[WrongKernels]:
    """What releases that the target has, or may have, compute wrongly unless the weights are smaller."""
    release, kinds = target.runtime.get("onnxruntime"), set(integer_products(graph))
    return [
        row
        for row in known_wrong()
        if row.weight_limit and kinds.intersection(row.products) and row.on(target.architecture, target.features)
        if release is None or row.in_release(release)
    ]


def _opened(path: Path) -> tuple[ir.Model, list[str]]:
    changes: list[str] = []
    graph = from_proto(load_model(path, external_data="all"), where=path)
    if not is_quantized(graph):
        raise ModelError(f"{path} is not quantized", "Use `edgeq quantize`")
    old = opset_of(graph)
    if old < LOWEST:
        graph = raise_opset(graph, path)
        changes.append(f"opset {old} → {opset_of(graph)}")
    write_shapes(graph)  # integer types are needed to know what can be shifted
    name_nodes(graph)
    tidy(graph)
    remove_no_ops(graph)  # PyTorch shares scales by Identity nodes
    check_form(graph, path)
    return graph, [*changes, *normalise(graph)]


def _rewrite(
    graph: ir.Model,
    before: Form,
    changes: list[str],
    format: str | None,
    activation_type: str | None,
    weight_type: str | None,
    wanted: Callable[[ir.Node], bool],
) -> list[str]:
    """Change format and types in place; `changes` grows; gives what stayed and why."""
    kept: list[str] = []
    keeps_integer_operators = format is None and before.format == "QOperator"
    needs_weights = activation_type == "int8" and weight_type is None
    integer_operators = sum(map(is_integer_operator, graph.graph))
    if before.format != "QDQ":
        kept += to_qdq(graph)
    if weight_type is not None or needs_weights:
        chosen = weight_type or "int8"
        count = shift_weights(graph, INTEGERS[chosen])
        if count:
            changes.append(f"{count} weights → {chosen}, by 128 in integers and zero points")
    if activation_type is not None:
        count, stuck = shift_activations(graph, INTEGERS[activation_type])
        kept += stuck
        if count:
            changes.append(f"{count} activations → {activation_type}, by 128 in integers and zero points")
    if format == "QOperator" or keeps_integer_operators:
        count, stuck = to_qoperator(graph, wanted)
        kept += stuck
        if format == "QOperator":
            changes.append(f"{count} operators between DequantizeLinear and QuantizeLinear → integer operators")
    gone = integer_operators - sum(map(is_integer_operator, graph.graph))
    if gone > 0:
        changes.append(f"{gone} integer operators → DequantizeLinear, operator, QuantizeLinear")
    return kept


def _check_request(format: str | None, activation_type: str | None, weight_type: str | None) -> None:
    choices: Sequence[tuple[str, str | None, Sequence[str]]] = (
        ("format", format, FORMATS),
        ("activation type", activation_type, tuple(INTEGERS)),
        ("weight type", weight_type, tuple(INTEGERS)),
    )
    for name, value, known in choices:
        if value is not None and value not in known:
            raise UsageError(f"the {name} is {value!r}", f"It can be {' or '.join(known)}")
    if all(value is None for _, value, _ in choices):
        raise UsageError("nothing is to be changed", "Name a target, a format or a type")
    if activation_type == "int8" and weight_type == "uint8":
        raise UsageError("int8 activations with uint8 weights have no kernels", "Make the weight type int8")
