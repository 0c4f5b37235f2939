"""Check what an older function wrote, and report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgeq.compat.source import LOG
from edgeq.errors import ModelError, RuntimeUnavailableError
from edgeq.model.graph import MAIN_DOMAINS
from edgeq.model.load import is_quantized, read_model, save_model
from edgeq.quantization.float_guard import fit_to_runtime
from edgeq.run.session import SessionSettings, open_session


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


def check_written(draft: Path, output: Path, notes: Iterable[str]) -> Written:
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
    # A node of a domain that the model does not import cannot run.
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
    options, why, changed = fit_to_runtime(model, guard=False)
    # `fit_to_runtime` may correct the model itself, so the file is written again before it is opened.
    if changed:
        save_model(model, draft)
    try:
        # A model that passes the checker can still lack a kernel, and only opening it shows that.
        open_session(draft, SessionSettings(config=options))
    except RuntimeUnavailableError as error:
        # The user knows the output, not the draft.
        problem = error.problem.replace(str(draft), str(output))
        raise RuntimeUnavailableError(problem, "Choose other types, operators or nodes") from error
    for note in why:
        LOG.warning("%s: %s", output, note)
    return Written(output, options, (*notes, *why))
