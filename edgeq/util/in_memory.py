"""Give a model in memory a file, because jobs read models from files and start processes that open them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgeq_device.system.places import scratch_folder

from edgeq.errors import UsageError

_PREFIX = "edgeq-in-memory-"


def on_disk(argument: Any, stack: ExitStack) -> Any:
    """Return the path of a file with the model if `argument` is an onnx.ModelProto. Return any other argument
    unchanged. The file exists until `stack` closes.

    Raises:
        UsageError: the model is too large for one protobuf message.
    """
    # The class is not imported here, because importing onnx takes longer than many functions that need no model.
    if type(argument).__name__ != "ModelProto":
        return argument
    path = Path(stack.enter_context(scratch_folder(_PREFIX))) / "model.onnx"
    try:
        path.write_bytes(argument.SerializeToString())
    except ValueError as error:  # protobuf's limit of 2 GiB
        fix = "Save it with external data (onnx.save_model), and give its path"
        raise UsageError("the model in memory is larger than 2 GiB", fix) from error
    return path


def is_in_memory(path: Path) -> bool:
    """Return whether a model's file was made by `on_disk`, so that nothing can be written next to it."""
    return path.parent.name.startswith(_PREFIX)
