"""Watch which kinds of kernels qemu translates, in its log of translated code."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from edgeq.emulate.emulator import Kernels

# The encoding of an Advanced SIMD or SVE instruction in qemu's log ("0x7f12: 4e80a400 ...").
_CODE = re.compile(rb":  ([0246][ef45][0-9a-f]{6})\b")


class KernelWatch:
    """Read qemu's log of translated code from a named pipe, and record which kinds of kernels appear in the log."""

    def __init__(self, kernels: Iterable[Kernels], folder: Path) -> None:
        self._kernels = tuple(kernels)
        self.pipe = folder / "code"
        # The log has a line for each translated instruction. Through a pipe, it takes no space on the disk.
        os.mkfifo(self.pipe)
        self._kinds: set[str] = set()
        self._thread = threading.Thread(target=self._read_log, daemon=True)
        # Open both ends of the pipe here, so that neither end waits for the other one to be opened. The reader stops at
        # the mark `_END`.
        self._write_end = os.open(self.pipe, os.O_RDWR)
        self._thread.start()

    def finish(self) -> tuple[str, ...]:
        """Return the names of the kinds that appeared, in the order of the emulator's list."""
        os.write(self._write_end, _END)
        self._thread.join()
        os.close(self._write_end)
        return tuple(kernels.name for kernels in self._kernels if kernels.name in self._kinds)

    def _read_log(self) -> None:
        with self.pipe.open("rb") as stream:
            self._kinds = scan(stream, self._kernels)


_END = b"\n\0end\n"


def scan(stream: IO[bytes], kernels: Iterable[Kernels]) -> set[str]:
    """Return the names of the kinds of kernels whose instructions are in a log of translated code."""
    patterns = [(int(mask, 16), int(value, 16), k.name) for k in kernels for mask, value in k.patterns]
    kinds: set[str] = set()
    codes: set[bytes] = set()
    remaining = b""
    while chunk := os.read(stream.fileno(), 1 << 20):
        text = remaining + chunk
        cut = text.rfind(b"\n") + 1
        # Only whole lines are searched, because a chunk may end inside an instruction.
        codes.update(_CODE.findall(text[:cut]))
        remaining = text[cut:]
        if _END.strip() in text:
            break
    # The same instruction is logged many times, so the patterns are compared once for each different code.
    for code in codes:
        number = int(code, 16)
        kinds.update(name for mask, value, name in patterns if number & mask == value)
    return kinds
