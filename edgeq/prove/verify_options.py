"""Turn the options of `edgeq verify` for other targets into a request, and refuse options that do not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeq.emulate.check import VerifyRequest
from edgeq.errors import UsageError
from edgeq.measure.task import split_task_options
from edgeq.util.numbers import parse_drop


def read_verify_request(bundle: Path, variant: str | None, options: Mapping[str, Any]) -> VerifyRequest:
    """Return the request that the arguments of `edgeq verify` describe.

    Raises:
        UsageError: `max_drop` is given without `task`.
    """
    named, _ = split_task_options(options)
    fields = {name: options[name] for name in ("on", "data", "count", "preprocess", "labels", "task", "expect")}
    drop = parse_drop(options["max_drop"])
    if drop is not None and options["task"] is None:
        raise UsageError("⟨max_drop⟩ needs a task that measures accuracy", "Give ⟨task⟩ and labelled ⟨data⟩")
    return VerifyRequest(bundle, variant=variant, options=named, max_drop=drop, **fields)


def refuse_with_log(options: Mapping[str, Any]) -> None:
    """Refuse options that a check of a chip's output does not use.

    Raises:
        UsageError: such an option is given.
    """
    name = next((name for name, value in options.items() if value not in (None, ())), None)
    if name is not None:
        raise UsageError(f"⟨{name}⟩ does not apply to a chip's output", "Leave it out, or leave out ⟨log⟩")


def refuse_without_target(options: Mapping[str, Any]) -> None:
    """Refuse options for the comparison with a target if no target is named.

    Raises:
        UsageError: such an option is given but no target.
    """
    name = next((name for name, value in options.items() if value not in (None, ())), None)
    if name is not None:
        raise UsageError(f"⟨{name}⟩ is for checks on another target's kernels", "Name the target with ⟨on⟩")
