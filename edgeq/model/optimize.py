"""ONNX Runtime's basic graph optimisation, for what every target wants: folded constants and merged nodes."""

from __future__ import annotations

from pathlib import Path

from edgeq.errors import ModelError, RuntimeUnavailableError
from edgeq.session import SessionSettings, onnxruntime, open_session

# ConstantSharing renames weights; the other two choose quantized or layout-specific forms, a backend's business.
_DISABLED = ("ConstantSharing", "WeightBiasQuantization", "NchwcTransformer")


def optimize_basic(model: Path, optimized: Path, *, source: Path, external: bool) -> None:
    """Write ONNX Runtime's basic-level optimisation of `model` to `optimized`.

    Basic level only rewrites to standard operators; fused and hardware-specific ones come with the levels above.

    Args:
        source: the file that the user gave, for messages.
        external: write weights to external data beside `optimized`, as models near 2 GB need.

    Raises:
        ModelError: onnxruntime refuses the model.
        RuntimeUnavailableError: onnxruntime is not installed.
        OSError: there is no space for `optimized`.
    """
    version = onnxruntime().__version__
    config = {"optimization.disable_specified_optimizers": ";".join(_DISABLED)}
    if external:
        config["session.optimized_model_external_initializers_file_name"] = f"{optimized.name}.data"
        config["session.optimized_model_external_initializers_min_size_in_bytes"] = "1024"
    try:
        open_session(model, SessionSettings(config=config, optimization="basic", save_optimized_to=optimized))
    except RuntimeUnavailableError as error:
        text = " ".join(str(error.__cause__ or error).split()).replace(str(model), source.name)
        raise ModelError(
            f"{source}: onnxruntime {version} refuses it: {text[:300]}",
            "Run it in onnxruntime where it was exported; if an operator is unknown, use a newer onnxruntime",
        ) from error
