from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from edgeq.emulate.emulator import load_emulators
from edgeq.emulate.probe import build_probe_model, classify_sums, probe
from edgeq.emulate.proof import KernelProof, check_kernels, load_proof, save_proof
from edgeq.emulate.watch import KernelWatch, scan
from edgeq.errors import CheckFailedError, RuntimeUnavailableError
from edgeq.hardware.target import resolve
from edgeq.run.session import open_session

ARM = load_emulators()["arm64"]


def test_this_machine_answers_as_its_profile_says() -> None:
    saturates = bool(resolve("auto").profile.hazards.get("saturates_int16"))
    assert probe(open_session(build_probe_model()), "here") == ("saturated" if saturates else "exact")


@pytest.mark.parametrize(
    ("value", "kind"), [(64 * 255 * 127, "exact"), (32 * 32767, "saturated"), (0, None), (64 * 255 * 127 + 1, None)]
)
def test_the_two_sums_and_no_other(value: int, kind: str | None) -> None:
    sums = np.full((8, 32), value, np.int32)
    if kind is not None:
        assert classify_sums(sums, "x") == kind
        sums[3, 3] += 1
    with pytest.raises(CheckFailedError, match=r"x: integer products are wrong"):
        classify_sums(sums, "x")


@pytest.mark.parametrize(("pairs", "saturates"), [("exact", True), ("saturated", False)])
def test_other_kernels_than_the_target_s_are_not_believed(pairs: str, saturates: bool) -> None:
    with pytest.raises(CheckFailedError, match=r"runs other kernels than the target"):
        check_kernels(KernelProof(pairs, ()), None, saturates=saturates, title="x")
    check_kernels(KernelProof(pairs, ()), None, saturates=not saturates, title="x")


@pytest.mark.parametrize(
    ("features", "seen", "fine"),
    [
        (("asimd",), (), True),
        (("asimddp",), ("dot product",), True),
        (("asimddp",), (), False),
        (("asimddp", "i8mm"), ("matrix multiply",), True),
        (("asimddp", "i8mm"), ("dot product",), False),
    ],
)
def test_the_instructions_of_the_best_feature_must_have_run(
    features: tuple[str, ...], seen: tuple[str, ...], fine: bool
) -> None:
    proof = KernelProof("exact", features, seen)
    if fine:
        check_kernels(proof, ARM, saturates=False, title="x")
        return
    with pytest.raises(CheckFailedError, match=r"instruction ran"):
        check_kernels(proof, ARM, saturates=False, title="x")


# Instruction words from llvm-mc and from qemu's own log.
@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("6e8e95b4", "dot product"),  # udot v20.4s, v13.16b, v14.16b
        ("4e829420", "dot product"),  # sdot v0.4s, v1.16b, v2.16b
        ("6fa4e310", "dot product"),  # udot v16.4s, v24.16b, v4.4b[1]
        ("4e9fa7dc", "matrix multiply"),  # smmla v28.4s, v30.16b, v31.16b
        ("45c6988f", "matrix multiply"),  # ummla z15.s, z4.b, z6.b
        ("6e22a445", None),  # umaxp v5.16b, v2.16b, v2.16b
        ("0e61c001", None),  # smull v1.4s, v0.4h, v1.4h
        ("d503201f", None),  # nop
    ],
)
def test_instructions_are_distinguished(word: str, kind: str | None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"----------------\nIN: \n0x7fb908de6874:  aa0003f5  mov x21, x0\n0x7fb908de6878:  {word}  .byte\n")
    with log.open("rb") as stream:
        assert scan(stream, ARM.kernels) == ({kind} if kind else set())


def test_a_watch_ends_when_it_is_stopped(tmp_path: Path) -> None:
    watch = KernelWatch(ARM.kernels, tmp_path)
    with watch.pipe.open("wb", buffering=0) as qemu:
        qemu.write(b"0x1:  45c6988f  .byte\n" * 100_000)
    assert watch.finish() == ("matrix multiply",)
    assert KernelWatch(ARM.kernels, Path(os.fspath(_made(tmp_path / "other")))).finish() == ()


def test_a_proof_is_kept(tmp_path: Path) -> None:
    proof = KernelProof("exact", ("asimd", "asimddp"), ("dot product",))
    file = tmp_path / "proofs" / "x.json"
    assert load_proof(file) is None
    save_proof(proof, file)
    assert load_proof(file) == proof
    file.write_text('{"pairs": "exact"}', encoding="utf-8")
    with pytest.raises(RuntimeUnavailableError, match="features is missing"):
        load_proof(file)
    assert [entry.name for entry in file.parent.iterdir()] == ["x.json"]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_scanning_reads_what_is_cut_between_chunks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"0x1:  d503201f  nop\n" * 60_000 + b"0x1:  6e8e95b4  .byte\n")
    with log.open("rb") as stream:
        assert isinstance(stream, io.BufferedReader)
        assert scan(stream, ARM.kernels) == {"dot product"}
