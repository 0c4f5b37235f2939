"""Find the accuracy recoveries by name. Each recovery is one file with an object `RECOVERY`. Plug-ins add recoveries
through an entry point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from edgeq.tuning.recover.base import Recovery, Stage
from edgeq.util.registry import RECOVERIES, Registry

REGISTRY: Registry[Recovery] = Registry(
    RECOVERIES, lambda recovery: isinstance(recovery, Recovery), "edgeq.tuning.recover.base.Recovery"
)


def recoveries() -> Mapping[str, Recovery]:
    """Return all recoveries by name, in the order in which they are applied. The order in which a user names them does
    not matter.

    Raises:
        UsageError: a recovery of a plug-in is broken.
    """
    stages = get_args(Stage)
    ordered = sorted((r for _, r in REGISTRY.items()), key=lambda r: (stages.index(r.stage), r.order, r.name))
    return {recovery.name: recovery for recovery in ordered}


def recovery_groups(*, complete: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the names of the recoveries for static schemes in groups, in the order in which tuning tries them.

    The first group contains all recoveries that cost no time on the device; they are tried together. The others follow
    one by one.

    Args:
        complete: whether the groups contain recoveries that a search tries only in candidates of their own
            (`Recovery.searched`).
    """
    every = {name: recovery for name, recovery in recoveries().items() if "static" in recovery.modes}
    free = tuple(name for name, recovery in every.items() if recovery.free)
    costly = (name for name, recovery in every.items() if (complete or recovery.searched) and not recovery.free)
    return (free, *((name,) for name in costly))
