"""The former place of `edgeq.jobs.checks.Improvement`, the type of extensions of results that are poor."""

from __future__ import annotations

from edgeq.jobs.checks import Improvement

__all__ = ["Improvement"]
