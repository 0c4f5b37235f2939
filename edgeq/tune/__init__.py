"""Search for the best quantized form of a model. The entry point `edgeq.tune(...)` is `edgeq.jobs.tune.tune`."""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.jobs.tune:tune")
