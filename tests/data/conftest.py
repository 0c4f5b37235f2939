"""Set no deadline for an example, because machines that run tests are often busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("edgeq", deadline=None)
settings.load_profile("edgeq")
