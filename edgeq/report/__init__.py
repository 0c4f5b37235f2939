"""Write report.html, one file that opens anywhere and shows how a model was quantized and what the results are.

Data flow: plain values (docs/report.md) → read.py (the figures and the verdict) → page.py (one HTML string).

`edgeq.report(...)` is `edgeq.report.bundle.report_bundle`.
"""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.report.bundle:report_bundle")
