"""Read the description of each emulated architecture (`targets/emulators/*.toml`), and prove which kernels run."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.system.places import exposure, scratch_folder
from msgspec import Meta
from numpy.typing import NDArray

from edgeq.errors import CheckFailedError, HardwareError, OutputError, RuntimeUnavailableError, UsageError
from edgeq.hardware import profile
from edgeq.measure.agreement import Session
from edgeq.model.edit import bytes_of_text
from edgeq.run.session import SessionSettings
from edgeq.util.record_files import read_json
from edgeq.util.records import Positive, parse, plain
from edgeq.util.registry import shipped, user_folder

Hex = Annotated[str, Meta(pattern="^[0-9a-f]+$", description="hexadecimal digits")]
Texts = tuple[str, ...]


@dataclass(frozen=True)
class Kernels:
    """Describe a [[kernels]] table: instructions that only kernels for `feature` contain.

    Attributes:
        patterns: pairs (mask, value) for the 32 bits of an instruction, in hexadecimal digits.
    """

    name: profile.Text
    feature: profile.Text
    patterns: tuple[tuple[Hex, Hex], ...]


@dataclass(frozen=True)
class QemuTable:
    """Describe the [qemu] table.

    Attributes:
        program: the program of qemu-user.
        packages: packages that may contain the program.
        honest_cpuinfo: the first qemu version that shows the guest a /proc/cpuinfo of the emulated CPU.
        missing: texts in qemu's warnings that show that the running CPU is not the named one.
        refused: patterns of CPU names for which qemu is known to run another CPU.
    """

    program: profile.Text
    honest_cpuinfo: profile.Version
    packages: Texts
    missing: Texts
    refused: Texts


@dataclass(frozen=True)
class Recipe:
    """Describe the [sysroot] table, which lists the contents of a private root file system.

    Attributes:
        packages: entries of the form "name" or "name|another name|...".
    """

    interpreter: profile.Text
    packages: Texts
    python_packages: Texts
    wheels: Texts
    wheel_platforms: Texts
    leave_out: Texts

    def leaves_out(self, name: str) -> bool:
        """Return whether the recipe leaves out files or packages with this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.leave_out)


@dataclass(frozen=True)
class Pins:
    """Describe the [pins] table: the SHA-256 of required packages ("name=version") and of wheels."""

    packages: Mapping[str, profile.Text] = field(default_factory=dict)
    wheels: Mapping[str, profile.Text] = field(default_factory=dict)


@dataclass(frozen=True)
class EmulatedSpeed:
    """Describe the [speed] table: approximate multiply-accumulates per second of an emulated CPU, in int8 and float."""

    int8: Positive
    float: Positive


@dataclass(frozen=True)
class Emulator:
    """Describe one emulated architecture: targets/emulators/NAME.toml.

    Attributes:
        elf_machine: e_machine in the ELF header of the architecture's programs.
        sysroot: the recipe of its root file system; None if it uses the host's.
        kernels: patterns by which kernels are recognised in translated code. Kernels that require the least of the CPU
            come first.
        name: the file's name without suffix, which is also the name of the architecture.
    """

    title: profile.Text
    architecture: profile.Text
    elf_machine: int
    qemu: QemuTable
    speed: EmulatedSpeed
    sysroot: Recipe | None = None
    pins: Pins = Pins()
    kernels: tuple[Kernels, ...] = ()
    name: str = ""

    @property
    def program(self) -> str:
        """Return the name of the qemu-user program."""
        return self.qemu.program

    def check_cpu(self, cpu: str) -> None:
        """Refuse the name of a CPU if qemu would run another CPU without a warning.

        Raises:
            HardwareError: qemu would run another CPU.
        """
        if any(fnmatchcase(cpu, pattern) for pattern in self.qemu.refused):
            raise HardwareError(
                f"{self.program} has no {cpu}: it silently runs a lesser CPU under that name",
                "Name a CPU that it has in [emulate], or check on a machine of that kind",
            )


def load_emulators() -> dict[str, Emulator]:
    """Return all emulated architectures by name.

    Raises:
        HardwareError: a description is not valid.
    """
    documents = profile.read_folder(shipped("targets") / "emulators", Emulator)
    return {
        name: replace(parse(document.content, Emulator, document.file, HardwareError), name=name)
        for name, document in documents.items()
    }


def emulator_named(name: str) -> Emulator:
    """Return the emulator for an architecture that needs a root file system.

    Raises:
        UsageError: there is no emulator of that name, or the emulator needs no setup.
    """
    known = {key: emulator for key, emulator in load_emulators().items() if emulator.sysroot is not None}
    if name not in known:
        raise UsageError(f"there is no emulated machine {name!r}", f"There are {', '.join(known)}")
    return known[name]


def home() -> Path:
    """Return the folder of emulated machines, in the user's cache (XDG_CACHE_HOME).

    Raises:
        RuntimeUnavailableError: the user has no cache folder.
    """
    folder = user_folder("cache")
    if folder is None:
        raise RuntimeUnavailableError("there is no home folder for emulated machines", "Set XDG_CACHE_HOME")
    return folder / "emulate"


def checked(place: Path, setup: str) -> Path:
    """Return `place` in the cache, which contains programs or code. It may not exist.

    Args:
        setup: the command that makes it again, for the error.

    Raises:
        RuntimeUnavailableError: others could have changed it.
    """
    if problem := exposure(place):
        raise RuntimeUnavailableError(
            problem, f"Remove {place}, set XDG_CACHE_HOME to a folder that only you can write, and run: {setup}"
        )
    return place


def check_writable() -> None:
    """Create the cache folder, so that a problem with the folder shows before any long task starts.

    Raises:
        OutputError: the folder cannot be created.
    """
    try:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{home()} cannot be created ({error.strerror})", "Set XDG_CACHE_HOME to another folder"
        ) from error


EXACT, SATURATED = "exact", "saturated"

# Two products of the largest values add up to 2 x 255 x 127 = 64,770, which does not fit 16 bits. A kernel that adds
# pairs in 16 bits gives 32,767 for each pair. No kernel treats these matrix sizes as a special case.
_ROWS, _DEPTH, _COLUMNS = 8, 64, 32
_LEFT, _RIGHT, _CLAMP = 255, 127, 32767

# The encoding of an Advanced SIMD or SVE instruction in qemu's log ("0x7f12: 4e80a400 ...").
_CODE = re.compile(rb":  ([0246][ef45][0-9a-f]{6})\b")


@dataclass(frozen=True)
class KernelProof:
    """Record the evidence of which kernels run.

    Attributes:
        pairs: "saturated" if sums of two u8 x s8 products are clamped to 16 bits, else "exact".
        features: features that the CPU reports.
        instructions: the kinds of kernels whose instructions qemu translated while the probe ran; None if qemu's
            translation cannot be watched.
    """

    pairs: str
    features: tuple[str, ...]
    instructions: tuple[str, ...] | None = None


@cache
def probe_model() -> bytes:
    """Return the probe model: a product of u8 inputs with constant s8 values."""
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 13]>
        probe (uint8[{_ROWS}, {_DEPTH}] left) => (int32[{_ROWS}, {_COLUMNS}] sums) {{
            sums = MatMulInteger(left, right)
        }}""",
        {"right": np.full((_DEPTH, _COLUMNS), _RIGHT, np.int8)},
    )


def integer_model(weights: NDArray[np.int8]) -> bytes:
    """Return a model with a Conv and a MatMul of uint8 activations with `weights`, int8 [outputs, k]. All scales are 1.

    From float32 "x" [4, k, 1, 1], it computes the exact integers "conv" and "product" as float32.
    """
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
    """Yield a file with the probe model, or with `content` if it is not empty. The file is removed after the block."""
    with scratch_folder("edgeq-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        file.write_bytes(content or probe_model())
        yield file


def probe(session: Session, title: str) -> str:
    """Run the probe and return "exact" or "saturated".

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    (sums,) = session.run(["sums"], {"left": np.full((_ROWS, _DEPTH), _LEFT, np.uint8)})
    return kind_of_sums(np.asarray(sums), title)


def probe_engine(open_it: Callable[[Path, SessionSettings], Any], engine: EngineSpec, title: str) -> str:
    """Run the probe on an engine whose kernels accept only Q/DQ models. Return "exact" or "saturated".

    Args:
        open_it: a function that opens a file as a session in a process of the engine.

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    with probe_file(integer_model(np.full((_COLUMNS, _DEPTH), _RIGHT, np.int8))) as file:
        session = open_it(file, SessionSettings(engine=engine, intra_op_threads=1))
        (sums,) = session.run(["product"], {"x": np.full((4, _DEPTH, 1, 1), _LEFT, np.float32)})
        session.close()
    return kind_of_sums(np.asarray(sums), title)


def kind_of_sums(sums: NDArray[Any], title: str) -> str:
    """Return "exact" or "saturated" for the probe's output (int32).

    Args:
        title: the name of the runtime, for messages.

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    for kind, value in ((EXACT, _DEPTH * _LEFT * _RIGHT), (SATURATED, _DEPTH // 2 * _CLAMP)):
        if (sums == value).all():
            return kind
    raise CheckFailedError(
        f"{title}: integer products are wrong ({int(sums.min())} to {int(sums.max())})",
        "Do not trust results from this CPU",
    )


def check_kernels(proof: KernelProof, emulator: Emulator | None, *, saturates: bool, title: str) -> None:
    """Check that the kernels that ran are the target's.

    Args:
        saturates: whether the target clamps sums of u8 x s8 pairs to 16 bits.

    Raises:
        CheckFailedError: kernels other than the target's ran.
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
        seen = ", ".join(proof.instructions) or "no instruction that distinguishes kernels"
        raise CheckFailedError(
            f"{title} has {able[-1].feature}, but no {able[-1].name} instruction ran (seen: {seen})",
            "Check on a machine of the target's kind",
        )


class KernelWatch:
    """Read qemu's log of translated code from a named pipe, and record which kinds of kernels appear in the log."""

    def __init__(self, kernels: Iterable[Kernels], folder: Path) -> None:
        self._kernels = tuple(kernels)
        self.pipe = folder / "code"
        os.mkfifo(self.pipe)
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        # Open both ends of the pipe here, so that neither end waits for the other one to be opened. The reader stops at
        # the mark `_END`.
        self._own_end = os.open(self.pipe, os.O_RDWR)
        self._thread.start()

    def finish(self) -> tuple[str, ...]:
        """Return the names of the kinds that appeared, in the order of the emulator's list."""
        os.write(self._own_end, _END)
        self._thread.join()
        os.close(self._own_end)
        return tuple(kernels.name for kernels in self._kernels if kernels.name in self._seen)

    def _read(self) -> None:
        with self.pipe.open("rb") as stream:
            self._seen = scan(stream, self._kernels)


_END = b"\n\0end\n"


def scan(stream: IO[bytes], kernels: Iterable[Kernels]) -> set[str]:
    """Return the names of the kinds of kernels whose instructions are in a log of translated code."""
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
    """Return a proof that `save_proof` wrote; None if the file does not exist.

    Raises:
        RuntimeUnavailableError: the file is damaged.
    """
    if not file.is_file():
        return None
    return read_json(file, KernelProof, RuntimeUnavailableError, "Remove it")


def save_proof(proof: KernelProof, file: Path) -> None:
    """Write a proof atomically, because several processes may write it at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(plain(proof)) + "\n", encoding="utf-8")
    draft.replace(file)
