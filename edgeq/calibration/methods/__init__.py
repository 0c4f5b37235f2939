"""Find calibration methods by name. Each method is one file with an object `METHOD`. Plug-ins add methods through an
entry point.
"""

from __future__ import annotations

from edgeq.calibration.range_method import RangeMethod
from edgeq.util.registry import METHODS, Registry

REGISTRY: Registry[RangeMethod] = Registry(
    METHODS, lambda method: isinstance(method, RangeMethod), "edgeq.calibration.range_method.RangeMethod"
)
