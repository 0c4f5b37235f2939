"""Open the best variant that really starts and answers correctly, and report why each better one was passed over.

A model for a plug-in engine is opened in a separate process, because the plug-in may be broken or wrong on this device.
The model must pass its self-test there before it is used. If it fails, another variant runs. An engine that TensorRT
compiles for this GPU must also pass the self-test before it is used.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple

from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.bundle.select import Choice, select
from edgeq_device.bundle.selftest import run_selftest
from edgeq_device.engines.catalog import CPU, find_plugin, read_installed_version
from edgeq_device.engines.device import Device
from edgeq_device.engines.guest import Guest, GuestSession, build_python_command
from edgeq_device.engines.serve import build_open_request
from edgeq_device.engines.sessions import open_session
from edgeq_device.engines.tensorrt import PROVIDER
from edgeq_device.engines.variant import DRAWN, Variant
from edgeq_device.errors import CheckFailedError, RuntimeUnavailableError

Open = Callable[[Variant, int], Any]
ANSWER_S = 120.0
"""Seconds in which a plug-in must open the model or answer a test vector. If it takes longer, it counts as hung, and
another variant runs."""
RUN_S = 3600.0
"""The same limit for a run after the self-test, whose input may be larger."""


@dataclass(frozen=True)
class OpenedVariant:
    """Hold a variant with its session. `passed_over` contains the reason against each better variant."""

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
) -> OpenedVariant:
    """Open the best variant for `device`, or only the variant `name` if that is given.

    Args:
        open_it: function that takes a variant and a number of threads and returns a session. If it fails, the next
            variant is tried. None uses `open_variant`.

    Raises:
        BundleError: no variant fits.
        RuntimeUnavailableError: the variant `name`, or the last one that fits, does not open.
        CheckFailedError: the variant `name` gives wrong answers here.
    """
    failed: Dict[str, str] = {}
    while True:
        choice = select(bundle, device, component, name, failed=failed)
        try:
            session = (open_it or open_variant)(choice.variant, threads)
        except (RuntimeUnavailableError, CheckFailedError) as error:
            # The user named it, or onnxruntime's own kernels refuse it: there is no fallback.
            if name is not None or choice.variant.ep == CPU:
                raise
            failed[choice.variant.name] = str(error)
            continue
        better = [v for v in choice.rejected if v.variant.rank > choice.variant.rank and not v.fits]
        # In the order in which they would have been preferred.
        better.sort(key=lambda verdict: -verdict.variant.rank)
        return OpenedVariant(choice, session, tuple(f"not {v.variant.name}: {'; '.join(v.reasons)}" for v in better))


def open_variant(variant: Variant, threads: int = 0) -> Any:
    """Return a session of `variant`. If a plug-in runs the variant, the session is in a separate process, which ends
    when the session does.

    Raises:
        RuntimeUnavailableError: the variant does not open, or the plug-in crashes or hangs.
        CheckFailedError: the answers of the plug-in or of TensorRT's engine are wrong.
    """
    session = start_variant(variant, threads)
    if isinstance(session, GuestSession):
        _refuse_wrong(variant, session, session.guest.title)
        # A user's input may be far larger than a vector.
        session.guest.request_s = RUN_S
    elif variant.ep == PROVIDER and variant.cases and "table" not in variant.info:
        # From correct files, TensorRT 8.6.0 built engines that gave wrong answers, so its engines are tested first. A
        # variant with a calibration table is not tested: TensorRT then chooses the precisions itself, and the vectors
        # are those of the float model.
        _refuse_wrong(variant, session, "TensorRT's engine")
    return session


def _refuse_wrong(variant: Variant, session: Any, title: str) -> None:
    if not variant.cases and variant.info.get(DRAWN):  # no output can be compared
        return
    result = run_selftest(variant, session)
    if not result.passed:
        raise CheckFailedError(f"{title} gives wrong results here: {result.reason}")


def start_variant(variant: Variant, threads: int = 0) -> Any:
    """Do the work of `open_variant` without the self-test."""
    engine = find_plugin(variant.ep)
    if engine is None:
        return open_session(variant, threads)
    guest = Guest(
        build_python_command("edgeq_device.engines.serve"),
        os.environ,
        f"{engine.name} {read_installed_version(engine)}",
        request_s=ANSWER_S,
    )
    try:
        session = guest.open_session(build_open_request(variant, threads))
        variant.check_unchanged()
    # On Ctrl-C, too: nobody else would end the process.
    except BaseException:
        guest.end()
        raise
    # The caller knows only the session, so the process ends with it.
    weakref.finalize(session, guest.end)
    return session
