"""Quantize prepared models. The public function `edgeq.quantize` is `edgeq.jobs.quantize.quantize`."""

from __future__ import annotations

from edgeq.util.public import make_callable

make_callable(__name__, "edgeq.jobs.quantize:quantize")
