"""How long ONNX Runtime's threads look for more work, at full speed, before they sleep.

By default that is tens of milliseconds after a run has ended: on a machine of few cores whatever runs next, such as
another model that is measured side by side, has a core less. A model that ran in 12 ms took 24 ms next to another one.
A millisecond keeps the threads awake from one operator to the next and from one run to the next.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping

BRIEF_SPIN: Mapping[str, str] = MappingProxyType({"session.intra_op.spin_duration_us": "1000"})
"""Session configuration entries; a version of onnxruntime that does not know them takes no notice."""
