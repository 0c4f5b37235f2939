"""Machines that run tests are often busy: no deadline for a single example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("edgeq", deadline=None)
settings.load_profile("edgeq")
