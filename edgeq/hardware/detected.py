"""Return this machine together with the profile that fits it, for `edgeq.detect()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from edgeq.hardware.detect import Machine, detect_machine
from edgeq.hardware.profile import ProfileMatch, load_profiles, match_profile
from edgeq.util.display import Page


@dataclass(frozen=True, repr=False)
class Detected(Machine, Page):
    """Describe a detected machine.

    Attributes:
        match: the profile that fits best, the reasons, and what the machine lacks for each profile with a higher rank.
    """

    match: ProfileMatch | None = None

    def __brief__(self) -> Mapping[str, Any]:
        named = {"profile": self.match.profile.name, "title": self.match.profile.title} if self.match else {}
        cpu = {"cpu": self.cpu_name, "board": self.board, "cores": self.cores, "gpus": self.gpus, "os": self.os}
        return {**named, "architecture": self.architecture, **cpu, "runtimes": self.runtimes, "notes": self.notes}

    def __page__(self) -> Mapping[str, Any]:
        rows = [
            (name, str(value)) for name, value in self.__brief__().items() if isinstance(value, str | int) and value
        ]
        rows += [(f"{name} version", version) for name, version in self.runtimes.items()]
        rows += [("GPU", gpu.name) for gpu in self.gpus]
        rows += [("because", line) for line in (self.match.explain() if self.match else ())]
        notes = {"notes": list(self.notes)}
        return {"name": "This machine", "tables": [("Detected", ("", ""), rows)], **notes}


def detect() -> Detected:
    """Detect this machine and its best profile. This takes milliseconds, or a second if py-cpuinfo is needed."""
    machine = detect_machine()
    # The subclass adds only the match, so all fields of the machine are passed on by name.
    values = {field.name: getattr(machine, field.name) for field in fields(machine)}
    return Detected(**values, match=match_profile(machine, load_profiles()))
