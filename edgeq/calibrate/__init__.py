"""Calibrate models. `edgeq.calibrate(...)` calls the function `edgeq.jobs.calibrate.calibrate`."""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.jobs.calibrate:calibrate")
