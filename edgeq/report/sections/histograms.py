"""The tensors that lose most to their ranges: what they hold, and where each method cuts."""

from __future__ import annotations

from edgeq.report.charts.histogram import histogram_chart
from edgeq.report.data import TensorHistogram, Variant
from edgeq.report.markup import Markup, isolated, tag
from edgeq.report.numbers import share
from edgeq.report.sections.blocks import section

_SHOWN = 8


def histograms_section(variant: Variant, anchor: str = "ranges") -> Markup:
    cards = [_card(t) for t in variant.histograms[:_SHOWN] if any(t.counts)]
    return section(
        anchor,
        "Ranges of the worst tensors",
        tag("div", *cards, class_="cards") if cards else None,
        lead="Bars: how often each value came up in calibration (logarithmic). Strips: the range that each method "
        "would keep, with the SQNR of the tensor quantized alone; the one in use is bold, and what it clips is shaded.",
    )


def _card(tensor: TensorHistogram) -> Markup:
    texts = []
    if tensor.zeros >= 0.0005:
        texts.append(f"{share(tensor.zeros)} are exactly zero, not drawn")
    if tensor.clipped is not None:
        texts.append(f"{share(tensor.clipped, 3)} clipped" if tensor.clipped else "nothing clipped")
    return tag(
        "figure",
        tag("figcaption", isolated(tensor.name, limit=60, class_="layer")),
        histogram_chart(tensor, 360),
        tag("p", ", ".join(texts), class_="muted small") if texts else None,
    )
