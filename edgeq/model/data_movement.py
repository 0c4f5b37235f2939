"""Operators that only move numbers."""

from __future__ import annotations

DATA_MOVEMENT = frozenset(
    {
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "MaxPool",
        "Pad",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
"""Their integer kernels copy values and cannot rescale them: integers behind mean what those in front mean."""
