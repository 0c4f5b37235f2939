"""Accuracy recovery: what can be done when a quantized model falls short of the float model.

Each method is a module and a `Recovery` of its own; `recover` applies several in the order in which they make sense.
"""

from __future__ import annotations

from edgeq.tune.recover.base import Recovery, State
from edgeq.tune.recover.methods import recoveries
from edgeq.tune.recover.run import Recoverer, recover

__all__ = ["Recoverer", "Recovery", "State", "recover", "recoveries"]
