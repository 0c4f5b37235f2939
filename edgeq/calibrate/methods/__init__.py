"""Find calibration methods by name: one file each, with its object `METHOD`; plug-ins add theirs by an entry point."""

from __future__ import annotations

from edgeq.calibrate.range_method import RangeMethod
from edgeq.util.registry import METHODS, Registry

REGISTRY: Registry[RangeMethod] = Registry(
    METHODS, lambda found: isinstance(found, RangeMethod), "edgeq.calibrate.range_method.RangeMethod"
)
