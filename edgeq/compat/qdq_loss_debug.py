"""Provide the functions of ONNX Runtime's `quantization.qdq_loss_debug`, which return the same dictionaries.

edgeq matches weights in every quantized format. The older tool matches them by name, and only in QDQ models. `edgeq
debug` also finds which layers lose accuracy, and why (docs/debug.md).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgeq.compat.preprocess import write
from edgeq.data.samples import open_samples
from edgeq.errors import UsageError
from edgeq.measure.inference import run_samples
from edgeq.measure.match_weights import match_weights, weight_values
from edgeq.model.edit import Editor
from edgeq.model.graph import GraphIndex
from edgeq.model.load import FREE_INITIALIZERS, model_signature, read_model
from edgeq.model.shapes import infer_shapes
from edgeq.run.session import SessionSettings, open_session
from edgeq.util.paths import path_of

Array = NDArray[Any]
Arrays = Sequence[Array]
WeightError = Callable[[Any, Any], float]
ActivationError = Callable[[Any, Any], float]

SAVED = "_ReshapedSavedOutput"
"""The suffix that the older tool appends to a tensor's name if it outputs the tensor as one row of numbers."""
_SHAPE = "EdgeqSavedOutputShape"
_QUANTIZED_INPUT = "_QuantizeLinear_Input"
_DEQUANTIZED = re.compile(r"(?P<name>.+)_DequantizeLinear_Output(_\d+)?")


def modify_model_output_intermediate_tensors(
    input_model_path: str | Path,
    output_model_path: str | Path,
    op_types_for_saving: Sequence[str] | None = None,
    save_as_external_data: bool = False,
) -> None:
    """Write a copy of the model for debugging. The copy also outputs the float tensors that its nodes read and produce,
    each flattened to one axis.

    Only tensors of the main graph are output. Constants and tensors whose type cannot be inferred are left out.

    Args:
        output_model_path: path of the result. An existing file is replaced.
        op_types_for_saving: the operator types whose inputs and outputs are saved, or None for all.
        save_as_external_data: True to write weights to a file next to the model. For large models, edgeq always does
            this.
    """
    source, output = path_of(input_model_path), path_of(output_model_path, "output")
    model = read_model(source)
    _add_outputs(model, _float_tensors(model, op_types_for_saving))
    write(model, output, source=source, save_as_external_data=save_as_external_data, all_tensors_to_one_file=True)


def collect_activations(
    augmented_model: str | Path,
    input_reader: Any,
    session_options: Any = None,
    execution_providers: Sequence[str] | None = None,
) -> dict[str, list[Array]]:
    """Run a model that `modify_model_output_intermediate_tensors` wrote. Return one array per batch for each tensor.

    Args:
        input_reader: an object with `get_next`, or anything else that `edgeq.data.samples.open_samples` accepts.
        session_options: onnxruntime's `SessionOptions`. Without them, onnxruntime does not optimise the graph.
        execution_providers: the execution providers. The default is the CPU.

    Raises:
        DataError: the reader returns no inputs, or the model does not accept one of them.
    """
    path = Path(augmented_model)
    settings = SessionSettings(providers=tuple(execution_providers or ("CPUExecutionProvider",)), optimization="none")
    session = open_session(path, settings, options=session_options)
    samples = open_samples(input_reader, model_signature(path))
    activations: dict[str, list[Array]] = {}
    for _, outputs in run_samples({str(path): session}, samples):
        for name, array in outputs[str(path)].items():
            # A saved tensor takes precedence over the model's own output of the same name.
            if f"{name}{SAVED}" not in outputs[str(path)]:
                activations.setdefault(name.removesuffix(SAVED), []).append(array)
    return activations


def create_activation_matching(
    qdq_activations: Mapping[str, Arrays], float_activations: Mapping[str, Arrays] | None = None
) -> dict[str, dict[str, Arrays]]:
    """Return the activations of a QDQ model before and after QuantizeLinear/DequantizeLinear, and the activations of
    the float model.

    Args:
        qdq_activations, float_activations: the result of `collect_activations` for each model.

    Returns:
        name → dictionary with the keys "pre_qdq" and "post_qdq", and also "float" if `float_activations` has the
            tensor.
    """
    matching: dict[str, dict[str, Arrays]] = {}
    for name, pre_tensor, post_tensor in _pairs(qdq_activations):
        matching[name] = {"pre_qdq": qdq_activations[pre_tensor], "post_qdq": qdq_activations[post_tensor]}
        if float_activations is not None and name in float_activations:
            matching[name]["float"] = float_activations[name]
    return matching


def create_weight_matching(float_model_path: str | Path, qdq_model_path: str | Path) -> dict[str, dict[str, Array]]:
    """Return name → dictionary with the keys "float" and "dequantized". The first is the weight in the float model, the
    second is the weight that the quantized model computes with.

    Args:
        float_model_path: the model that was quantized. If the model was preprocessed first, pass the preprocessed
            model.
        qdq_model_path: a model in QDQ or QOperator form, or a dynamically quantized one.
    """
    float_graph, quantized = (GraphIndex(read_model(Path(path))) for path in (float_model_path, qdq_model_path))
    matching: dict[str, dict[str, Array]] = {}
    for match in match_weights(float_graph, quantized):
        # "dequantized" holds what the model computes with, whatever the format of the file.
        values, numbers = weight_values(float_graph, quantized, match)
        matching[match.name] = {"float": values, "dequantized": numbers}
    return matching


def compute_signal_to_quantization_noice_ratio(x: Array | Arrays, y: Array | Arrays) -> float:
    """Return 20 log10(|x| / |x - y|) in dB over all arrays. A norm below the epsilon of a double is replaced by that
    epsilon, so that the result is finite. The misspelt name is that of the older tool.
    """
    x_row, y_row = _in_a_row(x), _in_a_row(y)
    if x_row.size != y_row.size:
        raise UsageError(f"{x_row.size} values cannot be compared with {y_row.size}", "Give the same tensors")
    # The epsilon keeps the logarithm finite for equal tensors and for tensors of zeros.
    signal, noise = (max(float(np.linalg.norm(v)), sys.float_info.epsilon) for v in (x_row, x_row - y_row))
    return 20 * math.log10(signal / noise)


def compute_weight_error(
    weights_match: Mapping[str, Mapping[str, Array]],
    err_func: WeightError = compute_signal_to_quantization_noice_ratio,
) -> dict[str, float]:
    """Return the value of `err_func` for each weight in the result of `create_weight_matching`."""
    return {name: err_func(match["float"], match["dequantized"]) for name, match in weights_match.items()}


def compute_activation_error(
    activations_match: Mapping[str, Mapping[str, Arrays]],
    err_func: ActivationError = compute_signal_to_quantization_noice_ratio,
) -> dict[str, dict[str, float]]:
    """Return the values of `err_func` for each activation in the result of `create_activation_matching`. "qdq_err"
    compares the activation before and after rounding. "xmodel_err" compares the two models, if the float model's
    activation is given.
    """
    errors: dict[str, dict[str, float]] = {}
    for name, match in activations_match.items():
        errors[name] = {"qdq_err": err_func(match["pre_qdq"], match["post_qdq"])}
        if "float" in match:
            errors[name]["xmodel_err"] = err_func(match["float"], match["post_qdq"])
    return errors


def _float_tensors(model: ir.Model, op_types: Sequence[str] | None) -> dict[ir.Value, ir.DataType]:
    """Return the tensors that nodes read and produce, with their element types, in the order of the graph."""
    inferred = infer_shapes(model)[0]
    tensors: dict[ir.Value, ir.DataType] = {}
    for node in model.graph:
        if op_types is not None and node.op_type not in op_types:
            continue
        for value in (*node.inputs, *node.outputs):
            if value is None or value.is_initializer():
                continue
            # Inference may fail for custom operators, and then the tensor is left out.
            dtype = value.dtype or inferred.get(value.name or "", value).dtype
            if dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                tensors[value] = dtype
    return tensors


def _add_outputs(model: ir.Model, tensors: Mapping[ir.Value, ir.DataType]) -> None:

    # Version 3, the oldest version of the format, requires every initializer to be an input.
    model.ir_version = max(model.ir_version, FREE_INITIALIZERS)
    editor = Editor(model)
    shape = editor.constant(_SHAPE, np.array([-1], np.int64))
    for value, dtype in tensors.items():
        row = editor.node("Reshape", [value, shape], f"{value.name}{SAVED}", dtype=dtype)
        row.shape = ir.Shape([None])
        model.graph.outputs.append(row)


def _pairs(activations: Mapping[str, Arrays]) -> Iterator[tuple[str, str, str]]:
    """Yield (activation, tensor before rounding, tensor after rounding) once for each activation. All three are
    names.
    """
    yielded: set[str] = set()
    for name in activations:
        if name.endswith(_QUANTIZED_INPUT):
            # For a graph output, the tensor after DequantizeLinear keeps the original name.
            pair = (name.removesuffix(_QUANTIZED_INPUT), name, name.removesuffix(_QUANTIZED_INPUT))
        elif match := _DEQUANTIZED.fullmatch(name):
            pair = (match["name"], match["name"], name)
        else:
            continue
        if pair[0] not in yielded and pair[1] in activations and pair[2] in activations:
            yielded.add(pair[0])
            yield pair


def _in_a_row(arrays: Array | Arrays) -> NDArray[np.float64]:
    parts = [arrays] if isinstance(arrays, np.ndarray) else list(arrays)
    if not parts:
        raise UsageError("there are no arrays to compare", "Collect activations first")
    # float64, because float32 sums over millions of values lose the small errors that are measured here.
    return np.concatenate([np.asarray(part, np.float64).reshape(-1) for part in parts])
