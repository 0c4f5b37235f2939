"""Accept a model as the older functions did: by its path or in memory, with the names of its nodes unchanged."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from edgeq.model.convert import from_proto
from edgeq.model.files import data_names
from edgeq.model.load import save_model
from edgeq.model.prepare import PreparedModel, prepare_model
from edgeq.util.paths import path_of

LOG = logging.getLogger("edgeq.compat")
ModelInput = str | os.PathLike[str] | onnx.ModelProto
"""The type of `model_input` in the documentation."""


def as_given(model: ModelInput, folder: Path) -> PreparedModel:
    """Return the model in the form that the quantizer needs, with all its nodes. Nothing is folded or optimised,
    because the older functions did neither, and their users refer to nodes and tensors by name.

    But the following changes are made: an opset below 13 is raised, nodes without a name get one, weights are no longer
    inputs, Constant nodes become weights, 16-bit floats are widened, and shapes are inferred.

    Args:
        folder: a private folder.
    """
    # `simplify` would fold nodes that the user's lists name.
    return prepare_model(as_file(model, folder), folder / "prepared", simplify=False)


def siblings(model: ModelInput, output: Path) -> tuple[str, ...]:
    """For a model that is given by its path, return the result of `edgeq.model.load.data_beside`. For a model in
    memory, which always fits in one file, return an empty tuple.
    """
    # Weights in other files exist only next to a file.
    return () if isinstance(model, onnx.ModelProto) else data_names(output, path_of(model))


def as_file(model: ModelInput, folder: Path) -> Path:
    """Return the path of a model. Write a model in memory to `folder` first.

    Raises:
        UsageError: the model is neither a path nor a ModelProto.
    """
    if not isinstance(model, onnx.ModelProto):
        return path_of(model)
    # The steps that follow read files, so all models become one.
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    save_model(from_proto(model), path)
    return path


def listed(names: str | Iterable[str] | None) -> list[str]:
    """Return names of nodes or operator types as a list. A single name becomes a list of one."""
    return [names] if isinstance(names, str) else list(names or ())


def warn_unknown_nodes(model: ir.Model, *lists: Iterable[str] | None) -> None:
    """Log a warning for each name that matches no node of the model. The older functions silently ignored them."""
    node_names = {node.name for node in model.graph}
    # Each name once, in the order of the user's lists.
    for name in dict.fromkeys(name for names in lists for name in names or ()):
        if name not in node_names:
            LOG.warning("no node is named %r; it is ignored", name)
