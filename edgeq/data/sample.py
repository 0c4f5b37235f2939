"""One run's worth of a model's input, with its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeq.data.records import Array
from edgeq.util.display import Displayed


@dataclass(frozen=True)
class Sample(Displayed):
    """One run's worth of input.

    Attributes:
        name: file (and index in it), for messages.
        inputs: exactly what `session.run` takes, batch dimension included.
        label: class index or whatever the reader found; None where there is none. In a batch that was gathered for a
            model of fixed batch size, the tuple of its rows' labels.
        context: "file" (base name), "path" (below the data folder), "index" (in its file), "class" (sub-folder), and
            for images "original_size" (width, height), "scale", "offset" (see `edgeq.data.records.Geometry`). In a
            gathered batch: "rows" (the rows' contexts) and "valid" (how many rows are not filling).
    """

    name: str
    inputs: Mapping[str, Array]
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)
