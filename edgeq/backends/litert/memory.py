"""Forecast the memories that a model needs on a microcontroller, next to those that the target has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from edgeq.hardware.target import Target
from edgeq.util.display import Displayed
from edgeq.util.records import Amount, Count

_KIB = 1024
Text = Annotated[str, Meta(max_length=4096)]


@dataclass(frozen=True)
class MemoryForecast(Displayed):
    """Forecast the memories for one inference in TFLite Micro. Nothing was measured on a microcontroller.

    Attributes:
        target: name of the target.
        basis: the source of the figures.
        arena_bytes: memory that the interpreter needs for activations and its own data.
        file_bytes: size of the .tflite file, which stays in flash. The code of the runtime comes on top of it.
        sram_limit_kib, flash_limit_kib: memory of the target, KiB; None if the target's file does not state it.
    """

    target: Text
    basis: Text
    arena_bytes: Count
    file_bytes: Count
    sram_limit_kib: Amount | None = None
    flash_limit_kib: Amount | None = None

    @classmethod
    def of(cls, arena_bytes: int, file_bytes: int, target: Target, runtime: str) -> MemoryForecast:
        """Return the forecast for a target. `runtime` is a title of the runtime."""
        memories = target.device.get("memories", {})
        limits = (memories.get(name) for name in ("sram_kib", "flash_kib"))
        basis = f"the arena that {runtime} needed on this machine"
        return cls(target.name, basis, arena_bytes, file_bytes, *limits)

    def __str__(self) -> str:
        ram = of_limit(self.arena_bytes / _KIB, self.sram_limit_kib)
        flash = of_limit(self.file_bytes / _KIB, self.flash_limit_kib)
        return f"memory of {self.target}: RAM {ram} ({self.basis}), flash {flash} (the file)"

    def notes(self) -> tuple[str, ...]:
        """Return sentences with the forecast and the memories that are too small."""
        used = (("RAM", self.arena_bytes, self.sram_limit_kib), ("flash", self.file_bytes, self.flash_limit_kib))
        return str(self), *lacking_memories([(name, size / _KIB, limit) for name, size, limit in used])


def of_limit(used: float, limit: float | None) -> str:
    """Return a size in KiB, next to the size that the target has if it is known."""
    return f"{used:.0f} KiB" if limit is None else f"{used:.0f} of {limit:.0f} KiB"


def lacking_memories(memories: list[tuple[str, float, float | None]]) -> Iterator[str]:
    """Yield a sentence for each memory of the target that is too small, or one if no size is known.

    Args:
        memories: for each memory its name, the size that the model needs and the size that the target has, in KiB.
    """
    for name, used, limit in memories:
        if limit is not None and used > limit:
            yield (
                f"the model does not fit into the target: it needs {math.ceil(used):,} KiB of {name}, and the "
                f"target has {limit:,.0f} KiB; use a smaller model or another memory mode"
            )
    if all(limit is None for _, _, limit in memories):
        yield "edgeq does not know whether the model fits: the target's file has no [device.memories]"
