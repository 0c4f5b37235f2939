"""The former place of `edgeq.prove.checks.Improvement`, the type of extensions of results that are poor."""

from __future__ import annotations

from edgeq.prove.checks import Improvement

__all__ = ["Improvement"]
