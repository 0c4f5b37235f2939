"""report.html: what was done to a model and what came of it, as one file that opens anywhere.

plain values (docs/report.md) → read.py → data.py → verdict.py, sections/, charts/ → page.py → one HTML string
"""
