"""Write report.html: what was done to a model and its results, as one file that opens anywhere.

plain values (docs/report.md) → read.py: what was found, and the verdict → page.py: one HTML string

`edgeq.report(...)` is `edgeq.report.bundle.report_bundle`.
"""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.report.bundle:report_bundle")
