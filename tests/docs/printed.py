"""Compare the output that a page shows below a command with the output of a run.

- A page shows all lines of the output, in order. A line `…` stands for any lines.
- Lines are equal if they have the same words. The names of profiles and the lines of `edgeq detect` differ between
  machines, so any two are equal. Sentences on speed are left out.
- Numbers are compared only for the demo model, because the other models are stand-ins. They may differ by a tenth or
  by `SLACK`, because other kernels round in another way.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from edgeq.hardware.profile import load_profiles

GAP = "…"
SLACK = 0.2
"""Difference that a number may have in any case: a point in which one of the demo's 540 samples counts."""
SPEED = re.compile(r"'s speed|× the speed|difference in speed|speed is not measurable|^(faster|speed unproven): ")
MACHINE = re.compile(r"^  (CPU|system|cores|features|profile|because)  .*")
HASH = re.compile(r"\b[0-9a-f]{64}\b")
TIME = re.compile(r"# ?(?:ns|µs|ms|s)\b")
NUMBER = re.compile(r"(?<![\w.])[−+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\d.]*\w*-)")


@functools.cache
def _profiles() -> re.Pattern[str]:
    profiles = load_profiles()
    names = {*profiles, *(profile.title for profile in profiles.values())}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def split_numbers(line: str) -> tuple[str, list[float]]:
    """Return the words of a line, with "#" for each number, and the numbers. The words of a time have no number."""
    line = _profiles().sub("PROFILE", MACHINE.sub(r"\1", line))
    line = HASH.sub("HASH", re.sub(r"([━─])\1+", r"\1", " ".join(line.split())))
    words = NUMBER.sub("#", line)
    if TIME.search(words):
        return TIME.sub("TIME", words), []
    return words, [float(number.replace("−", "-")) for number in NUMBER.findall(line)]


def is_equal(shown: str, line: str, *, numbers: bool) -> bool:
    """Return whether a line of a page equals a line of the output."""
    (words, figures), (other_words, others) = split_numbers(shown), split_numbers(line)
    near = (abs(a - b) <= max(SLACK, abs(a) / 10, abs(b) / 10) for a, b in zip(figures, others, strict=False))
    return words == other_words and (not numbers or all(near))


def find_difference(shown: Sequence[str], output: str, *, numbers: bool) -> str:
    """Return a sentence on the first shown line that the output lacks or has elsewhere, or "" if all are as shown.

    Args:
        shown: the lines below the command on the page.
        numbers: whether numbers count.
    """
    shown = [line for line in shown if line.strip() and not SPEED.search(line)]
    lines = [line for line in output.splitlines() if line.strip() and not SPEED.search(line)]
    place, gap = 0, False
    for line in shown:
        if line.strip() == GAP:
            gap = True
            continue
        places = range(place, len(lines) if gap else min(place + 1, len(lines)))
        found = next((number for number in places if is_equal(line, lines[number], numbers=numbers)), None)
        if found is None:
            return f"the page shows\n    {line}\n  but the output is\n    " + "\n    ".join(lines[place:])
        place, gap = found + 1, False
    if place < len(lines) and not gap:
        return "the page lacks\n    " + "\n    ".join(lines[place:])
    return ""
