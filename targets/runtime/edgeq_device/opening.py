"""The best variant that really opens: where a provider is listed but does not start, the next one, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.package import MAIN, Bundle
from edgeq_device.select import CPU, Choice, Device, select
from edgeq_device.sessions import open_session
from edgeq_device.variants import Variant

Open = Callable[[Variant, int], Any]


@dataclass(frozen=True)
class Opened:
    """A variant with its session. `passed_over` says, for each better variant, why it is not this one."""

    choice: Choice
    session: Any
    passed_over: Tuple[str, ...]


def open_best(
    bundle: Bundle,
    device: Device,
    *,
    component: str = MAIN,
    name: Optional[str] = None,
    threads: int = 0,
    open_variant: Open = open_session,
) -> Opened:
    """Open the best variant for `device`; with `name`, that one and no other.

    Raises:
        BundleError: none fits.
        RuntimeUnavailableError: the one that was asked for, or the last that fits, does not open.
    """
    failed: Dict[str, str] = {}
    while True:
        choice = select(bundle, device, component, name, failed=failed)
        try:
            session = open_variant(choice.variant, threads)
        except RuntimeUnavailableError as error:
            if name is not None or choice.variant.ep == CPU:
                raise
            failed[choice.variant.name] = str(error)
            continue
        return Opened(choice, session, passed_over(choice))


def passed_over(choice: Choice) -> Tuple[str, ...]:
    """Why each variant that ranks above the chosen one is not it."""
    better = [verdict for verdict in choice.others if verdict.variant.rank > choice.variant.rank and not verdict.fits]
    ordered = sorted(better, key=lambda verdict: -verdict.variant.rank)
    return tuple(f"not {verdict.variant.name}: {'; '.join(verdict.reasons)}" for verdict in ordered)
