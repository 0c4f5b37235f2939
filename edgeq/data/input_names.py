"""Match the names of stored arrays to the names of a model's inputs."""

from __future__ import annotations

from edgeq_device.answers.rows import SIZE_INPUTS

from edgeq.errors import DataError
from edgeq.signature import Signature


def match_names(keys: list[str], signature: Signature, location: str) -> dict[str, str]:
    """Return model input → key in the file. A key is the input's name. numpy's unnamed keys (arr_0 …), and the key ""
    of a single array, are matched by the order of the inputs.

    Raises:
        DataError: an input has no array, or an array has no input and does not look like labels.
    """
    inputs = [spec.name for spec in signature.inputs]
    by_position = [f"arr_{i}" for i in range(len(inputs))]
    # Files with one unnamed array need no name, because there is only one input to feed.
    if keys == [""] and len(inputs) == 1:
        return {inputs[0]: ""}
    # numpy.savez gives these names to arrays without a keyword, in the order of the arguments.
    if sorted(keys) == sorted(by_position) and not set(keys) & set(inputs):
        return dict(zip(inputs, by_position, strict=True))
    missing = [name for name in inputs if name not in keys]
    extra = [key for key in keys if key not in inputs and key not in LABEL_KEYS]
    key_list = ", ".join(key or "one unnamed array" for key in keys)
    if missing:
        raise DataError(
            f"{location} has no array for the model input {missing[0]!r} (it holds {key_list}; "
            f"the model takes {', '.join(inputs)})",
            "Rename the arrays, or name them: ⟨preprocess⟩ 'key=NAME,label=NAME,…'",
        )
    # An array that nobody reads is more likely a misspelt input than ballast.
    if extra:
        raise DataError(
            f"{location} holds {extra[0]!r}, which is not an input of the model ({', '.join(inputs)})",
            "Remove or rename it",
        )
    return {name: name for name in inputs}


LABEL_KEYS = ("label", "labels")
"""Names of arrays in prepared files. Arrays with these names are labels even if no option names them."""


def choose_input(signature: Signature, requested: str | None) -> str:
    """Return the input that single raw items feed: the input `requested`, or else the only input apart from those for
    the size of an image. Return "" if `requested` is None and the model has several such inputs.

    Raises:
        DataError: `requested` is not an input.
    """
    names = [spec.name for spec in signature.inputs]
    # An image itself gives the inputs for its size.
    items = [name for name in names if name not in SIZE_INPUTS] or names
    if requested is not None and requested not in names:
        raise DataError(
            f"source.input = {requested!r} is not an input of the model", f"The inputs are {', '.join(names)}"
        )
    return requested or (items[0] if len(items) == 1 else "")
