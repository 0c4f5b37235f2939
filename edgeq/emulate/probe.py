"""Proof of the kernels that run: a small model whose output depends on the instruction set, and the code that ran."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from edgeq_device.engines import EngineSpec
from numpy.typing import NDArray

from edgeq.emulate.emulator import Emulator, Kernels
from edgeq.errors import CheckFailedError, RuntimeUnavailableError
from edgeq.graph.convert import bytes_of_text
from edgeq.measure.inference import Session
from edgeq.records import plain, read_json
from edgeq.session import SessionSettings

EXACT, SATURATED = "exact", "saturated"

# Two products of the largest values: 2 x 255 x 127 = 64,770 is more than 16 bits hold, so a kernel that adds pairs in
# 16 bits gives 32,767 for each pair. Sizes that no kernel treats as a special case.
_ROWS, _DEPTH, _COLUMNS = 8, 64, 32
_LEFT, _RIGHT, _CLAMP = 255, 127, 32767

# The encoding of an instruction in qemu's log ("0x7f12:  4e80a400  ..."): of Advanced SIMD and SVE alone.
_CODE = re.compile(rb":  ([0246][ef45][0-9a-f]{6})\b")


@dataclass(frozen=True)
class KernelProof:
    """What was seen of the kernels that run.

    Attributes:
        pairs: "saturated" where sums of two u8 x s8 products are clamped to 16 bits, else "exact".
        features: that the CPU reports.
        instructions: the kinds of kernels whose instructions were translated while the probe ran; None where that
            cannot be watched.
    """

    pairs: str
    features: tuple[str, ...]
    instructions: tuple[str, ...] | None = None


@cache
def probe_model() -> bytes:
    """The model: a product of u8 with constant s8 values."""
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 13]>
        probe (uint8[{_ROWS}, {_DEPTH}] left) => (int32[{_ROWS}, {_COLUMNS}] sums) {{
            sums = MatMulInteger(left, right)
        }}""",
        {"right": np.full((_DEPTH, _COLUMNS), _RIGHT, np.int8)},
    )


def integer_model(weights: NDArray[np.int8]) -> bytes:
    """A Conv and a MatMul of uint8 activations with `weights`, int8[outputs, k], all scales 1: float32 "x" of
    [4, k, 1, 1] gives the exact integers "conv" and "product" as float32."""
    outputs, k = weights.shape
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 17]>
        integers (float[4, {k}, 1, 1] x) => (float[4, {outputs}, 1, 1] conv, float[4, {outputs}] product)
        <float one = {{1}}, uint8 zero = {{0}}, int8 none = {{0}}, int64[2] rows = {{-1, {k}}}> {{
            q = QuantizeLinear(x, one, zero)
            d = DequantizeLinear(q, one, zero)
            f = DequantizeLinear(filters, one, none)
            conv = Conv<kernel_shape = [1, 1]>(d, f)
            r = Reshape(d, rows)
            m = DequantizeLinear(matrix, one, none)
            product = MatMul(r, m)
        }}""",
        {"filters": weights.reshape(outputs, k, 1, 1), "matrix": weights.T},
    )


@contextmanager
def probe_file(content: bytes = b"") -> Iterator[Path]:
    """The probe, or another model in its place, as a file, removed behind the block."""
    with tempfile.TemporaryDirectory(prefix="edgeq-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        file.write_bytes(content or probe_model())
        yield file


def probe(session: Session, title: str) -> str:
    """Run the probe: "exact" or "saturated".

    Raises:
        CheckFailedError: the sums are neither.
    """
    (sums,) = session.run(["sums"], {"left": np.full((_ROWS, _DEPTH), _LEFT, np.uint8)})
    return kind_of_sums(np.asarray(sums), title)


def probe_engine(open_it: Callable[[Path, SessionSettings], Any], engine: EngineSpec, title: str) -> str:
    """As `probe`, of an engine whose kernels take Q/DQ models alone.

    Args:
        open_it: opens a session of a file in a process of the engine.

    Raises:
        CheckFailedError: the sums are neither.
    """
    with probe_file(integer_model(np.full((_COLUMNS, _DEPTH), _RIGHT, np.int8))) as file:
        session = open_it(file, SessionSettings(engine=engine, intra_op_threads=1))
        (sums,) = session.run(["product"], {"x": np.full((4, _DEPTH, 1, 1), _LEFT, np.float32)})
        session.close()
    return kind_of_sums(np.asarray(sums), title)


def kind_of_sums(sums: NDArray[Any], title: str) -> str:
    """ "exact" or "saturated", by the probe's output (int32); `title` names what ran it, for messages.

    Raises:
        CheckFailedError: the sums are neither.
    """
    for kind, value in ((EXACT, _DEPTH * _LEFT * _RIGHT), (SATURATED, _DEPTH // 2 * _CLAMP)):
        if (sums == value).all():
            return kind
    raise CheckFailedError(
        f"{title}: integer products are wrong ({int(sums.min())} to {int(sums.max())})",
        "Do not rely on anything that runs there",
    )


def check_kernels(proof: KernelProof, emulator: Emulator | None, *, saturates: bool, title: str) -> None:
    """Hold what was seen against what the target is known for.

    Args:
        saturates: whether the target clamps sums of u8 x s8 pairs to 16 bits.

    Raises:
        CheckFailedError: other kernels run than the target's.
    """
    expected = SATURATED if saturates else EXACT
    if proof.pairs != expected:
        raise CheckFailedError(
            f"{title} runs other kernels than the target: its u8 x s8 sums are {proof.pairs}, not {expected}",
            "Check on a machine of the target's kind",
        )
    if proof.instructions is None or emulator is None:
        return
    able = [kernels for kernels in emulator.kernels if kernels.feature in proof.features]
    if able and able[-1].name not in proof.instructions:
        seen = ", ".join(proof.instructions) or "none of those that distinguish kernels"
        raise CheckFailedError(
            f"{title} has {able[-1].feature}, but no {able[-1].name} instruction ran (seen: {seen})",
            "Check on a machine of the target's kind",
        )


class Watch:
    """Reads qemu's log of translated code from a named pipe and keeps which kinds of kernels are in it."""

    def __init__(self, kernels: Iterable[Kernels], folder: Path) -> None:
        self._kernels = tuple(kernels)
        self.pipe = folder / "code"
        os.mkfifo(self.pipe)
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        # Open at both ends here, so that neither waits for the other; the reader ends at the mark below.
        self._own_end = os.open(self.pipe, os.O_RDWR)
        self._thread.start()

    def finish(self) -> tuple[str, ...]:
        """The names of the kinds seen, in the order of the emulator's list."""
        os.write(self._own_end, _END)
        self._thread.join()
        os.close(self._own_end)
        return tuple(kernels.name for kernels in self._kernels if kernels.name in self._seen)

    def _read(self) -> None:
        with self.pipe.open("rb") as stream:
            self._seen = scan(stream, self._kernels)


_END = b"\n\0end\n"


def scan(stream: IO[bytes], kernels: Iterable[Kernels]) -> set[str]:
    """The names of those kinds of kernels whose instructions a log of translated code holds."""
    wanted = [(int(mask, 16), int(value, 16), k.name) for k in kernels for mask, value in k.patterns]
    found: set[str] = set()
    codes: set[bytes] = set()
    remaining = b""
    while chunk := os.read(stream.fileno(), 1 << 20):
        text = remaining + chunk
        cut = text.rfind(b"\n") + 1
        codes.update(_CODE.findall(text[:cut]))
        remaining = text[cut:]
        if _END.strip() in text:
            break
    for code in codes:
        number = int(code, 16)
        found.update(name for mask, value, name in wanted if number & mask == value)
    return found


def load_proof(file: Path) -> KernelProof | None:
    """A proof that `save_proof` wrote; None where there is no file.

    Raises:
        RuntimeUnavailableError: the file is damaged.
    """
    if not file.is_file():
        return None
    return read_json(file, KernelProof, RuntimeUnavailableError, "Remove it")


def save_proof(proof: KernelProof, file: Path) -> None:
    """Write a proof, atomically: several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(plain(proof)) + "\n", encoding="utf-8")
    draft.replace(file)
