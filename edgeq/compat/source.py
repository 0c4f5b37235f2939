"""Accept onnxruntime's enumerations by member or by name, because scripts of several eras and packages mix them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from edgeq.errors import ModelError, RuntimeUnavailableError, UsageError
from edgeq.model.edit import from_proto
from edgeq.model.graph import MAIN_DOMAINS
from edgeq.model.load import data_beside, is_quantized, path_of, read_model, save_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.quantization.quantizer import settle
from edgeq.run.session import SessionSettings, open_session

METHODS: Mapping[str, str] = {"MinMax": "minmax", "Entropy": "entropy", "Percentile": "percentile"}
"""CalibrationMethod that gives ranges for integers → edgeq's method."""


def member(enumeration: str, value: Any) -> Any:
    """Return a member of `onnxruntime.quantization.<enumeration>`. `value` is the member or its name.

    Raises:
        UsageError: the enumeration does not have this member.
    """
    import onnxruntime.quantization

    members = getattr(onnxruntime.quantization, enumeration)
    name = name_of_member(value)
    if name not in members.__members__:
        raise UsageError(f"{enumeration} has no {name!r}", f"It can be {', '.join(members.__members__)}")
    return members[name]


def name_of_member(value: Any) -> str:
    """Return the name of an enumeration's member. `value` is the member or its name."""
    return str(getattr(value, "name", value))


def quant_type(value: Any) -> Any:
    """Return an integer QuantType. `value` is the member or its name.

    Raises:
        UsageError: the type is unknown or is a float type.
    """
    type_member = member("QuantType", value)
    if "FLOAT" in type_member.name:
        raise UsageError(f"{type_member.name} has no kernels on the CPU", "Choose an integer QuantType")
    return type_member


LOG = logging.getLogger("edgeq.compat")
ModelInput = str | os.PathLike[str] | onnx.ModelProto
"""The type of `model_input` in the documentation."""


@dataclass(frozen=True)
class Written:
    """Report what an older function wrote. The functions of onnxruntime returned None, so scripts may ignore this
    value.

    Attributes:
        output: the quantized model.
        session_options: session configuration entries to set when the model runs. Without them, ONNX Runtime's
            optimiser may make the model slower or less accurate.
        notes: changes to the model, and other facts that are useful to know.
    """

    output: Path
    session_options: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def as_given(model: ModelInput, folder: Path) -> PreparedModel:
    """Return the model in the form that the quantizer needs, with all its nodes. Nothing is folded or optimised,
    because the older functions did neither, and their users refer to nodes and tensors by name.

    But the following changes are made: an opset below 13 is raised, nodes without a name get one, weights are no longer
    inputs, Constant nodes become weights, 16-bit floats are widened, and shapes are inferred.

    Args:
        folder: a private folder.
    """
    return prepare_model(as_file(model, folder), folder / "prepared", simplify=False)


def siblings(model: ModelInput, output: Path) -> tuple[str, ...]:
    """For a model that is given by its path, return the result of `edgeq.model.load.data_beside`. For a model in
    memory, which always fits in one file, return an empty tuple.
    """
    return () if isinstance(model, onnx.ModelProto) else data_beside(output, path_of(model))


def as_file(model: ModelInput, folder: Path) -> Path:
    """Return the path of a model. Write a model in memory to `folder` first.

    Raises:
        UsageError: the model is neither a path nor a ModelProto.
    """
    if not isinstance(model, onnx.ModelProto):
        return path_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    save_model(from_proto(model), path)
    return path


def checked(draft: Path, output: Path, notes: Iterable[str]) -> Written:
    """Check a written model against the rules of the ONNX format and in ONNX Runtime, and find the session options that
    it needs.

    Args:
        draft: the file to check.
        output: the path to which the file will be moved, for messages.
        notes: notes of the earlier steps.

    Raises:
        ModelError: the checker rejects the model.
        RuntimeUnavailableError: ONNX Runtime cannot open the model.
    """
    model = read_model(draft)
    missing = sorted({node.domain for node in model.graph} - {*model.opset_imports, *MAIN_DOMAINS})
    if missing:
        raise ModelError(
            f"{output} uses operators of {missing[0]!r} without importing that domain", "Please report this"
        )
    if not is_quantized(model):
        raise ModelError(
            f"{output}: nothing in it was quantized",
            "Choose operator types and nodes of the model. For convolutions, use static quantization",
        )
    options, why, changed = settle(model, guard=False)
    if changed:
        save_model(model, draft)
    try:
        open_session(draft, SessionSettings(config=options))
    except RuntimeUnavailableError as error:
        problem = error.problem.replace(str(draft), str(output))
        raise RuntimeUnavailableError(problem, "Choose other types, operators or nodes") from error
    for note in why:
        LOG.warning("%s: %s", output, note)
    return Written(output, options, (*notes, *why))


def listed(names: str | Iterable[str] | None) -> list[str]:
    """Return names of nodes or operator types as a list. A single name becomes a list of one."""
    return [names] if isinstance(names, str) else list(names or ())


def warn_unknown_nodes(model: ir.Model, *lists: Iterable[str] | None) -> None:
    """Log a warning for each name that matches no node of the model. The older functions silently ignored them."""
    node_names = {node.name for node in model.graph}
    for name in dict.fromkeys(name for names in lists for name in names or ()):
        if name not in node_names:
            LOG.warning("no node is named %r; it is ignored", name)
