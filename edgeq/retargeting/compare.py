"""Compare two forms of one model on the same made-up inputs, and check whether a target can run a quantized model.

`check_target` checks whether the target's kernels accept the model's zero points, and whether they accept the model's
kind of scales: per tensor or per channel. Retargeting cannot change either of these without changing numbers. For
example, with a zero point other than 0, integers reach further to one side than to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.backends.base import backend_for
from edgeq.errors import CheckFailedError, ModelError, RuntimeUnavailableError, UsageError, one_line
from edgeq.hardware.target import Target
from edgeq.model.edit import Editor
from edgeq.model.graph import channel_axis, clamp_bounds, every_node, is_op, node_input, only_reader
from edgeq.model.load import model_signature
from edgeq.model.quant_params import LIMITS, QuantParams
from edgeq.retargeting.read import Form, places
from edgeq.retargeting.shift import INTEGERS, params_of, type_name
from edgeq.run.engines import DEFAULT, as_engine
from edgeq.run.session import SessionSettings, open_session, start_engine

USUAL = 0.1
"""Largest usual difference between QDQ and QOperator models, as a share of the largest output. Integer operators scale
and round in one step, but Q/DQ pairs in two. So an integer may differ by one, and later layers pass the difference on.
"""
_TRIES = 2
_PLAIN = SessionSettings(optimization="none")
_REPORT = "Please report this model"


@dataclass(frozen=True)
class RetargetComparison:
    """Hold the result of comparing the outputs of two models on made-up inputs.

    Attributes:
        identical: whether the outputs are equal to the last bit.
        largest: largest difference, as a share of the output's largest magnitude; infinite if only one of the models
            gives NaN or infinity.
    """

    identical: bool
    largest: float


def compare(
    source: Path, rewritten: Path, *, same_operators: bool, default: RetargetComparison | None = None
) -> RetargetComparison | None:
    """Compare the outputs of both models without ONNX Runtime's optimiser. Return None if the model `source` does not
    run on made-up inputs.

    Args:
        default: the result of `compare_by_default`.

    Raises:
        CheckFailedError: the operators are the same but the outputs differ; or the rewritten model does not run, or
            gives NaN or infinity with and without the optimiser.
    """
    unoptimised = compare_outputs(source, rewritten)
    if unoptimised is None:
        return None
    if same_operators and not unoptimised.identical:
        raise CheckFailedError(
            f"the rewritten model differs from {source} by {unoptimised.largest:.3g} of its outputs' magnitude",
            _REPORT,
        )
    if not np.isfinite([comparison.largest for comparison in (unoptimised, default) if comparison is not None]).any():
        raise CheckFailedError("the rewritten model gives NaN or infinity where the given one does not", _REPORT)
    return unoptimised


def compare_by_default(
    source: Path, rewritten: Path, options: Mapping[str, str], *, branches: bool = False
) -> tuple[RetargetComparison | None, str]:
    """Compare the outputs of both models in ONNX Runtime's default session, with its optimiser.

    Args:
        options: session options that the rewritten model needs.
        branches: whether the models have control flow. On such models, the optimiser of some releases crashes the
            process, so edgeq first tries it in a separate process.

    Returns:
        The result and "". If a model does not run, None and the reason; the reason is "" if `source` does not run.
    """
    settings = SessionSettings(), SessionSettings(config=options)
    problems = [_problem(*pair, branches) for pair in zip((source, rewritten), settings, strict=True)]
    if any(problems):
        return None, "" if problems[0] else problems[1]
    return compare_outputs(source, rewritten, settings), ""


def _problem(model: Path, settings: SessionSettings, branches: bool) -> str:
    try:
        if not branches:
            return _run(open_session(model, settings), made_up_inputs(model, seed=0))[1]
        with start_engine(as_engine(DEFAULT).engine) as guest:
            return _run(guest.open(model, settings), made_up_inputs(model, seed=0))[1]
    except RuntimeUnavailableError as error:
        return error.problem


def compare_outputs(
    reference: Path, candidate: Path, settings: tuple[SessionSettings, SessionSettings] = (_PLAIN, _PLAIN)
) -> RetargetComparison | None:
    """Run both models, each with its settings, on the same made-up inputs, and compare their outputs. Return None if
    `reference` refuses the inputs. By default, ONNX Runtime's optimiser is off.

    Raises:
        CheckFailedError: `candidate` refuses inputs that `reference` accepts.
    """
    sessions = [open_session(*pair) for pair in zip((reference, candidate), settings, strict=True)]
    return compare_sessions(reference, *sessions)


def compare_sessions(path: Path, reference: Any, candidate: Any) -> RetargetComparison | None:
    """Compare the outputs of two sessions on made-up inputs of the model `path`. See `compare_outputs`."""
    identical, largest = True, 0.0
    for number in range(_TRIES):
        inputs = made_up_inputs(path, seed=number, free=1 + number)
        expected, _ = _run(reference, inputs)
        if expected is None and number:  # the model fixes the batch size or another size internally
            continue
        if expected is None:
            return None
        outputs, problem = _run(candidate, inputs)
        if outputs is None:
            raise CheckFailedError(f"the rewritten model does not run: {problem}", _REPORT)
        for a, b in zip(expected, outputs, strict=True):
            equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            identical &= equal
            largest = largest if equal else max(largest, _difference(a, b))
    return RetargetComparison(identical, largest)


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    return float(np.max(np.abs(x - y), initial=0.0)) / (float(np.max(np.abs(x), initial=0.0)) or 1.0)


def _run(session: Any, inputs: Mapping[str, Any]) -> tuple[list[NDArray[Any]] | None, str]:
    """Return the outputs and "", or None and the reason for the failure."""
    try:
        return session.run(None, dict(inputs)), ""
    except Exception as error:  # onnxruntime raises a dozen unrelated types here, and sometimes a bare Exception
        return None, one_line(error)


def made_up_inputs(model: Path, *, seed: int, free: int = 1) -> dict[str, Any]:
    """Return noise for float inputs and 8-bit inputs. Other inputs are indices, masks or lengths and become 1, which is
    nearly always valid. Open sizes become `free`.
    """
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {}
    for spec in model_signature(model).inputs:
        shape = [size if isinstance(size, int) else free for size in spec.shape or ()]
        if spec.dtype.kind == "f":
            inputs[spec.name] = random.normal(size=shape).astype(spec.dtype)
        elif spec.dtype.name in INTEGERS:
            low, high = LIMITS[INTEGERS[spec.dtype.name]]
            inputs[spec.name] = random.integers(low, high + 1, shape).astype(spec.dtype)
        else:
            inputs[spec.name] = np.ones(shape, spec.dtype)
    return inputs


class _Trait(NamedTuple):
    """Describe a property of tensors. `words` name the property in messages. A scheme has the property if its field
    `field` has the value `value`.
    """

    field: str
    value: bool
    words: str


_SKEWED_WEIGHT = _Trait("weight_symmetric", False, "weights with a zero point other than 0")
_SKEWED = _Trait("activation_symmetric", False, "activations with a zero point other than 0")
_PER_CHANNEL = _Trait("per_channel", True, "weights with a scale for each channel")


def check_target(model: ir.Model, target: Target, model_path: Path, source_form: Form) -> None:
    """Refuse a model with a property that the backend of `target` does not support.

    Args:
        model_path: the file to retarget.
        source_form: the form of that file.

    Raises:
        ModelError: the target does not support a property; the message states the number of tensors, the first of them,
            and the reason.
    """
    backend, scheme = backend_for(target), target.profile.scheme
    problems, reasons = [], []
    for trait, tensors in _traits(model).items():
        try:
            backend.check(scheme.replace(**{trait.field: trait.value}))
        except UsageError as error:
            problems.append(f"{len(tensors)} {trait.words} ({next(iter(tensors))!r} first)")
            reasons.append(target.profile.why.get(trait.field) or error.problem)
    if problems:
        source = model_path if backend.adopts_quantized and source_form.format == "QDQ" else "FLOAT.onnx"
        raise ModelError(
            f"{model_path} has {' and '.join(problems)}, which {target.name} does not support: "
            + "; ".join(dict.fromkeys(reasons)),
            f"Other scales need samples: `edgeq quantize {source} -t {target.name} --data SAMPLES -o OUT.onnx`",
        )


def _traits(model: ir.Model) -> dict[_Trait, dict[str, None]]:
    """Return each property that some tensors have, with the names of these tensors."""
    traits: dict[_Trait, dict[str, None]] = {}
    for place in (place for node in every_node(model) for place in places(node)):
        low, high = LIMITS[place.params.dtype]
        if (place.params.zero_point != (low + high + 1) // 2).any():
            traits.setdefault(_SKEWED_WEIGHT if place.weight else _SKEWED, {})[place.tensor] = None
        if place.weight and place.params.per_channel:
            traits.setdefault(_PER_CHANNEL, {})[place.tensor] = None
    return traits


@dataclass(frozen=True, eq=False)
class In:
    """Describe an input that comes from a DequantizeLinear: its integers, and their scale and zero point."""

    value: ir.Value
    params: QuantParams


@dataclass(frozen=True, eq=False)
class Out:
    """Describe the nodes after an operator: the QuantizeLinear of its output, and the clamp before that, if any."""

    quantize: ir.Node
    params: QuantParams
    clamp: ir.Node | None


Sides = tuple[list[In], Out]
"""The inputs and the output of an operator."""


def _input(node: ir.Node, place: int) -> In | None:
    value = node_input(node, place)
    maker = value.producer() if value is not None else None
    if maker is None or not is_op(maker, "DequantizeLinear"):
        return None
    params, source = params_of(maker), maker.inputs[0]
    return In(source, params) if params is not None and source is not None else None


def _output(node: ir.Node) -> Out | None:
    user, clamp = only_reader(node.outputs[0]), None
    if is_op(user, "Relu", "Clip"):
        clamp = user
        assert clamp is not None
        user = only_reader(clamp.outputs[0])
    if user is None or not is_op(user, "QuantizeLinear"):
        return None
    params = params_of(user)
    return Out(user, params, clamp) if params is not None and not params.per_channel else None


def sides(node: ir.Node, count: int) -> Sides | str:
    """Return the first `count` inputs and the output of an operator. If it has no integer form, return the reason."""
    inputs = [_input(node, place) for place in range(count)]
    out = _output(node)
    connected = [i for i in inputs if i is not None]
    if len(connected) < len(inputs):
        return "an input is not quantized"
    if out is None:
        return "its output is not quantized, or other nodes read it before it is"
    if not constant_clamp(out):
        return "the bounds of its Clip are not constant"
    if connected[0].params.dtype != out.params.dtype:
        return f"it reads {type_name(connected[0].params.dtype)} and outputs {type_name(out.params.dtype)}"
    if connected[0].params.per_channel:
        return "its input has a scale per channel"
    return connected, out


def product_problem(node: ir.Node, operands: list[In]) -> str:
    """Return the reason why a Conv, MatMul or Gemm with these inputs has no integer form, or "" if it has one."""
    data, weight = operands
    if weight.params.block:
        return "its weight has a scale for each block"
    if weight.params.per_channel:
        rank = len(weight.value.shape) if weight.value.shape is not None else None
        if rank is None or weight.params.axis % rank != channel_axis(node) % rank:
            return "its weight has a scale for each input channel"
        if node.op_type == "MatMul" and rank != 2:
            return "its weight has a scale per channel and is not a matrix"
    if (data.params.dtype, weight.params.dtype) == (ir.DataType.INT8, ir.DataType.UINT8):
        return "int8 activations with uint8 weights have no kernel"
    return ""


def clamped(value: ir.Value, out: Out, editor: Editor) -> ir.Value:
    """Return the integers, clamped to the range that the Relu or Clip before the QuantizeLinear sets for the floats."""
    bounds = clamp_bounds(out.clamp) if out.clamp is not None else None
    if bounds is None:
        return value
    ends = [out.params.quantize(np.asarray(bound, np.float32)) for bound in bounds]
    # The limits of the integer type already clamp the same way.
    if int(ends[0]) == out.params.low and int(ends[1]) == out.params.high:
        return value
    low, high = (editor.constant(f"{value.name}/{w}", end) for w, end in zip(("low", "high"), ends, strict=True))
    dtype = out.params.dtype
    return editor.node("Clip", [value, low, high], f"{value.name}/clip", before=out.quantize, like=value, dtype=dtype)


def constant_clamp(out: Out) -> bool:
    """Return whether the clamp before the QuantizeLinear has constant bounds. Also return True if there is no clamp."""
    return out.clamp is None or clamp_bounds(out.clamp) is not None
