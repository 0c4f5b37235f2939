"""Session options that an ONNX file carries in its metadata, so that it is right without a bundle around it.

The metadata are untrusted: what may be set is what a bundle may set, but for what refers to other files. ONNX Runtime
itself knows nothing of this entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Union

from edgeq_device.errors import BundleError
from edgeq_device.onnxfile import read_metadata
from edgeq_device.options import session_problem
from edgeq_device.plainjson import parse_json

KEY = "edgeq.session_options"
"""The entry of the metadata: a JSON object of texts."""


def model_options(model: Union[Path, bytes], where: str) -> Dict[str, str]:
    """The session options that `model`, a file or its bytes, carries; `where` names it in messages.

    Raises:
        BundleError: the entry is not as it should be, or has an option or a value that a model may not set.
    """
    content = read_metadata(model, KEY, where)
    if content is None:
        return {}
    where = f"{where}: {KEY} in its metadata"
    found = parse_json(content, where)
    for key, value in found.items():
        problem = session_problem(key, value, references=False) if isinstance(value, str) else "is not a text"
        if problem:
            fix = "The options that a model may set, and their values, are in edgeq_device/options.json"
            raise BundleError(f"{where}: session option {key[:60]!a} {problem}", fix)
    return found
