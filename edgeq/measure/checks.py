"""What was checked of an artifact, and on what: the target's hardware, an emulation, a model of it, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

CheckKind = Literal["native", "emulated", "modelled", "none"]
_STRENGTH = {kind: place for place, kind in enumerate(get_args(CheckKind))}


@dataclass(frozen=True)
class Check:
    """One check of one artifact for one target.

    Attributes:
        name: "load", "coverage", "accuracy", "self-test", "saturation", "kernels".
        kind: whose arithmetic it rests on: the target's kernels here, in an emulator, in a model of them; "none": of
            other kernels, or not made.
        where: on what machine or simulator.
        detail: what was found, one line.
        passed: None where there is nothing to pass.
    """

    name: str
    kind: CheckKind
    where: str = ""
    detail: str = ""
    passed: bool | None = None


def strongest(checks: Iterable[Check]) -> tuple[Check, ...]:
    """One check of each name, the one nearest to the hardware; of two of a kind the later. In the order of names."""
    best: dict[str, Check] = {}
    for check in checks:
        known = best.get(check.name)
        if known is None or _STRENGTH[check.kind] <= _STRENGTH[known.kind]:
            best[check.name] = check
    return tuple(best.values())


def summarise(checks: Iterable[Check]) -> str:
    """The checks by kind, in one line."""
    by_kind: dict[str, list[str]] = {}
    for check in checks:
        by_kind.setdefault("not on its kernels" if check.kind == "none" else check.kind, []).append(check.name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
