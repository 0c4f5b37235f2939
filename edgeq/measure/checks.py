"""Describe the checks of an artifact, and whose kernels they ran on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

CheckKind = Literal["native", "emulated", "modelled", "none"]
# The kinds are listed from the target's hardware down, so a smaller position is a stronger check.
_STRENGTH = {kind: place for place, kind in enumerate(get_args(CheckKind))}


@dataclass(frozen=True)
class ArtifactCheck:
    """Describe one check of one artifact for one target.

    Attributes:
        name: "load", "coverage", "accuracy", "self-test", "saturation" or "kernels".
        kind: whose arithmetic was checked: that of the target's own kernels ("native"), of the same kernels in an
            emulator ("emulated"), or of a model of them ("modelled"). "none" means that other kernels ran, or that
            nothing was checked.
        where: machine or simulator that ran the check.
        detail: the finding, one line.
        passed: whether the check passed; None if it cannot pass or fail.
    """

    name: str
    kind: CheckKind
    where: str = ""
    detail: str = ""
    passed: bool | None = None


def keep_strongest(checks: Iterable[ArtifactCheck]) -> tuple[ArtifactCheck, ...]:
    """Return one check for each name. If several checks have the same name, return the one whose kind is nearest to the
    hardware. If two of these have the same kind, return the later one.

    The checks are in the order in which their names first appear.
    """
    best: dict[str, ArtifactCheck] = {}
    for check in checks:
        previous = best.get(check.name)
        if previous is None or _STRENGTH[check.kind] <= _STRENGTH[previous.kind]:
            best[check.name] = check
    return tuple(best.values())


# Checks on other kernels prove nothing about the target, and the text says so.
_WORDS: dict[CheckKind, str] = {
    "native": "on the target's kernels",
    "emulated": "on the target's kernels in an emulator",
    "modelled": "by a model of the target",
    "none": "only on other kernels",
}


def summarise(checks: Iterable[ArtifactCheck]) -> str:
    """Return the checks, grouped by kind, in one line."""
    by_kind: dict[str, list[str]] = {}
    for check in checks:
        by_kind.setdefault(_WORDS[check.kind], []).append(check.name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
