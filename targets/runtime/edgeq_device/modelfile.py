"""What a model file of a bundle may not be or hold: what makes ONNX Runtime open files, or what no check can read.

- A node of type EPContext gives a provider a program that was compiled for it, or the path of one (absolute, or out of
  the bundle with ".."): TensorRT, QNN, OpenVINO and others load it as it is.
- ONNX Runtime's own format is not ONNX: checks of nodes and of external data that read ONNX see nothing in it.

The bytes are searched, not parsed. A node's type stands in the file as it is, however the message around it is
encoded, so nothing escapes the search; a model that uses the word for something else is refused with the rest.
"""

from __future__ import annotations

from pathlib import Path

from edgeq_device.errors import BundleError

CONTEXT = b"EPContext"
_ORT_MARK = b"ORTM"
_CHUNK = 1 << 20
_FIX = "Package the ONNX model itself; the device compiles it"


def check_model(path: Path, where: str) -> None:
    """Refuse the model file at `path` if it is not ONNX or holds a compiled program.

    Raises:
        BundleError: as it says, or the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(_CHUNK)
            # Bytes 4 to 7 of a flatbuffer name its schema; ONNX Runtime goes by them or by the suffix.
            if start[4:8] == _ORT_MARK or path.suffix.lower() == ".ort":
                raise BundleError(f"{where}: {path.name} is in ONNX Runtime's own format, not ONNX", _FIX)
            chunk, tail = start, b""
            while chunk:
                if CONTEXT in tail + chunk:
                    raise BundleError(
                        f"{where}: {path.name} holds an EPContext node: a compiled program, or the path of one", _FIX
                    )
                tail = (tail + chunk)[1 - len(CONTEXT) :]
                chunk = stream.read(_CHUNK)
    except OSError as error:
        raise BundleError(f"{where}: {path.name} cannot be read ({error.strerror})") from error
