"""Split more gates than `split_gates` does, down to a smaller share of the error. This costs more convolutions and
leaves less noise.

It is a recovery of its own because each split gate costs a convolution. A search tries the cheaper form first, and this
one only if the loss is still too large. A recovery does not know the loss, so one recovery could not choose by itself.
"""

from __future__ import annotations

from edgeq.tuning.recover.methods.split_gates import SplitGates

RECOVERY = SplitGates("split-more-gates", share=0.02, replaces=SplitGates.name)
