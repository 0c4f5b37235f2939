"""Keep the former name of `edgeq.model.graph.GraphIndex` importable."""

from __future__ import annotations

from edgeq.model.graph import GraphIndex

__all__ = ["GraphIndex"]
