"""Prove that the kernels that ran are the target's, and keep the proof in a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from edgeq.emulate.emulator import Emulator
from edgeq.emulate.probe import EXACT, SATURATED
from edgeq.errors import CheckFailedError, RuntimeUnavailableError
from edgeq.util.record_files import read_json
from edgeq.util.records import plain


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
    # Without a log of translated code, the sums are the only evidence.
    if proof.instructions is None or emulator is None:
        return
    # The best kernels that the CPU allows are the ones that must have run.
    able = [kernels for kernels in emulator.kernels if kernels.feature in proof.features]
    if able and able[-1].name not in proof.instructions:
        instructions = ", ".join(proof.instructions) or "no instruction that distinguishes kernels"
        raise CheckFailedError(
            f"{title} has {able[-1].feature}, but no {able[-1].name} instruction ran (seen: {instructions})",
            "Check on a machine of the target's kind",
        )


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
    # The process number keeps the drafts of parallel processes apart.
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(plain(proof)) + "\n", encoding="utf-8")
    draft.replace(file)
