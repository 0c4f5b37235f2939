"""Keep the last few models that edgeq wrote in memory, so that no step reads them again."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgeq.model.graph import GraphIndex
from edgeq.model.load import read_unchecked

# A comparison needs two models at once. Each kept model takes the memory of its weights.
_MAX_SHARED = 2


def share_model(model: ir.Model, path: Path, origin: GraphIndex) -> GraphIndex:
    """Keep in memory the model that was just written to `path`. `shared_model` then need not read the file. The model
    must not be changed afterwards.

    Args:
        origin: the prepared model that the model was made from. It keeps the last few models that were made from it,
            and frees them when it is freed itself.
    """
    models = _shared_models(origin)
    # The file is new, so what is kept for its path is out of date.
    models.pop(path, None)
    while len(models) >= _MAX_SHARED:
        models.pop(next(iter(models)))
    graph = GraphIndex(model, path)
    models[path] = _file_state(path), graph
    return graph


def shared_model(path: Path, origin: GraphIndex) -> GraphIndex:
    """Return the model in a file that edgeq wrote. The model is shared: to change it, change a clone.

    Args:
        origin: the prepared model that the model was made from; see `share_model`.

    Raises:
        ModelError: for the same reasons as `read_unchecked`.
    """
    state, graph = _shared_models(origin).get(path, ((), None))
    return (
        graph if graph is not None and state == _file_state(path) else share_model(read_unchecked(path), path, origin)
    )


def _shared_models(source: GraphIndex) -> dict[Path, tuple[tuple[int, ...], GraphIndex]]:
    return source.once("files that were made of it", dict)


def _file_state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
