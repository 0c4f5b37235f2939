"""Split more gates than `split_gates` does, down to a smaller share of the error. This costs more convolutions and
leaves less noise.
"""

from __future__ import annotations

from edgeq.tuning.recover.methods.split_gates import SplitGates

RECOVERY = SplitGates("split-more-gates", share=0.02, replaces=SplitGates.name)
