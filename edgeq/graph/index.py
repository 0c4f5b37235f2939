"""The former place of `edgeq.model.graph.GraphIndex`."""

from __future__ import annotations

from edgeq.model.graph import GraphIndex

__all__ = ["GraphIndex"]
