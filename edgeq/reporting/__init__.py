"""Write report.html, one file that opens anywhere and shows how a model was quantized and what the results are.

Data flow: plain values (docs/report.md) → read.py (the figures and the verdict) → page.py (one HTML string). The public
function `edgeq.report` is `edgeq.reporting.bundle.report_bundle`.
"""
