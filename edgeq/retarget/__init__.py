"""Rewrite models that are already quantized for another runtime. Calling this package calls
`edgeq.retarget.run.retarget`.
"""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.retarget.run:retarget")
