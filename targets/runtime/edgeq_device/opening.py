"""The best variant that really opens: where a provider is listed but does not start, the next one, with the reason.

What a plug-in engine runs is opened in a process of its own, and used after its self-test held there: the plug-in may
be broken or wrong on this device, and then another variant runs.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

from edgeq_device.engines import installed_version, plugin_of
from edgeq_device.errors import CheckFailedError, RuntimeUnavailableError
from edgeq_device.guest import Guest, GuestSession, python_command
from edgeq_device.package import MAIN, Bundle
from edgeq_device.select import CPU, Choice, Device, precision_of, select
from edgeq_device.selftest import run_selftest
from edgeq_device.serve import open_request
from edgeq_device.sessions import open_session
from edgeq_device.variants import Variant

Open = Callable[[Variant, int], Any]
ANSWER_S = 120.0
"""A plug-in that has not opened the model, or answered a test vector, by then hangs: another variant runs."""
RUN_S = 3600.0
"""The same for a run after the self-test, whose input may be larger."""


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
    open_it: Optional[Open] = None,
) -> Opened:
    """Open the best variant for `device`; with `name`, that one and no other.

    Args:
        open_it: what must succeed with a variant and a number of threads; its result is the session. None opens it.

    Raises:
        BundleError: none fits.
        RuntimeUnavailableError: the one that was asked for, or the last that fits, does not open.
        CheckFailedError: the one that was asked for runs in a plug-in whose answers are wrong.
    """
    failed: Dict[str, str] = {}
    while True:
        choice = select(bundle, device, component, name, failed=failed)
        try:
            session = (open_it or open_variant)(choice.variant, threads)
        except (RuntimeUnavailableError, CheckFailedError) as error:
            if name is not None or choice.variant.ep == CPU:
                raise
            failed[choice.variant.name] = str(error)
            continue
        return Opened(choice, session, passed_over(choice))


def open_variant(variant: Variant, threads: int = 0) -> Any:
    """A session of `variant`; where a plug-in runs it, in a process of its own that ends with the session.

    Raises:
        RuntimeUnavailableError: it does not open; the plug-in crashes or hangs.
        CheckFailedError: the plug-in's answers are wrong.
    """
    session = start_variant(variant, threads)
    if isinstance(session, GuestSession):
        found = run_selftest(variant, session)
        if not found.passed:
            raise CheckFailedError(f"{session.guest.title} is not right here: {found.reason}")
        session.guest.request_s = RUN_S
    return session


def start_variant(variant: Variant, threads: int = 0) -> Any:
    """`open_variant` without the self-test."""
    engine = plugin_of(variant.ep)
    if engine is None:
        return open_session(variant, threads)
    guest = Guest(
        python_command(f"{__package__}.serve"),
        os.environ,
        f"{engine.name} {installed_version(engine)}",
        request_s=ANSWER_S,
    )
    try:
        session = guest.opened(open_request(variant, threads, precision_of(variant, engine)))
        variant.check_unchanged()
    except BaseException:
        guest.end()
        raise
    weakref.finalize(session, guest.end)
    return session


def passed_over(choice: Choice) -> Tuple[str, ...]:
    """Why each variant that ranks above the chosen one is not it."""
    better = [verdict for verdict in choice.others if verdict.variant.rank > choice.variant.rank and not verdict.fits]
    ordered = sorted(better, key=lambda verdict: -verdict.variant.rank)
    return tuple(f"not {verdict.variant.name}: {'; '.join(verdict.reasons)}" for verdict in ordered)
