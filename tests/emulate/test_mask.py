from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeq.emulate import routes
from edgeq.emulate.emulator import load_emulators
from edgeq.emulate.machine import build_command
from edgeq.emulate.probe import probe, probe_file
from edgeq.emulate.routes import build_masked_command, patch_library
from edgeq.errors import RuntimeUnavailableError
from edgeq.run.session import GuestProgram, SessionSettings, start_guest

# Two CPUID instructions, and the same bytes inside a constant, which must not change.
ASKING = """
#include <stdint.h>
uint32_t ask(uint32_t leaf, uint32_t subleaf, int reg)
{
    uint32_t r[4];
    __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(subleaf));
    return r[reg];
}
uint32_t highest(void)
{
    uint32_t a, b, c, d;
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(0), "c"(0));
    return a;
}
uint32_t constant(void) { return 0x11a20f11; }
"""
IN_A_PROCESS_OF_ITS_OWN = """
import ctypes, sys
shim, library = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
shim.edgeq_mask_count.restype = ctypes.c_ulong
for f in (library.ask, library.highest, library.constant):
    f.restype = ctypes.c_uint32
assert shim.edgeq_mask_clear(1, 0, 2, 1 << 28) == 0
assert shim.edgeq_mask_install() == 0
print(library.ask(1, 0, 2), library.ask(7, 0, 1), library.ask(1, 0, 3), library.highest(), library.constant())
print(shim.edgeq_mask_count())
"""


@pytest.fixture
def compiler() -> None:
    if routes.mask_problem() or not sys.platform.startswith("linux") or not importlib.util.find_spec("onnxruntime"):
        pytest.skip(routes.mask_problem() or "CPUID is an x86-64 instruction")
    if load_emulators()["x86_64"].elf_machine != int.from_bytes(Path(sys.executable).read_bytes()[18:20], "little"):
        pytest.skip("CPUID is an x86-64 instruction")


def compiled(source: str, place: Path) -> Path:
    place.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(place.with_suffix(".c")), "-o", str(place)], check=True)
    return place


def test_only_instructions_are_replaced_and_only_bits_are_cleared(compiler: None, tmp_path: Path) -> None:
    plain = compiled(ASKING, tmp_path / "plain.so")
    changed = tmp_path / "patched.so"
    changed.write_bytes(patch_library(plain))
    assert changed.read_bytes().count(b"\x0f\xff") == plain.read_bytes().count(b"\x0f\xff") + 2
    shim = compiled(Path(routes.__file__).with_name("cpuid_mask.c").read_text(), tmp_path / "shim.so")
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN, str(shim), str(changed)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    answers, count = ran.stdout.splitlines()
    library = ctypes.CDLL(str(plain))
    for function in (library.ask, library.highest, library.constant):
        function.restype = ctypes.c_uint32
    masked, features, edx, highest, constant = map(int, answers.split())
    assert masked & 1 << 28 == 0
    # The bits of leaf 1 that change from run to run (APIC, OSXSAVE) are in other registers than these.
    assert masked | 1 << 28 == library.ask(1, 0, 2) | 1 << 28
    assert (features, edx) == (library.ask(7, 0, 1), library.ask(1, 0, 3))
    assert (highest, constant, int(count)) == (library.highest(), 0x11A20F11, 4)


def test_another_illegal_instruction_still_ends_the_process(compiler: None, tmp_path: Path) -> None:
    shim = compiled(Path(routes.__file__).with_name("cpuid_mask.c").read_text(), tmp_path / "shim.so")
    bad = compiled("void bad(void) { __builtin_trap(); }", tmp_path / "bad.so")
    code = "import ctypes, sys\nctypes.CDLL(sys.argv[1]).edgeq_mask_install()\nctypes.CDLL(sys.argv[2]).bad()"
    ran = subprocess.run([sys.executable, "-c", code, str(shim), str(bad)], capture_output=True)
    assert ran.returncode == -4


def test_without_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeUnavailableError, match=r"needs cc and objdump. Install a C compiler|needs Linux"):
        build_masked_command(["avx512f"])


def sums(guest: GuestProgram) -> str:
    with probe_file() as file:
        return probe(guest.open(file, SessionSettings()), "a guest")


# All test machines have to run without these features, because each adds integer products that do not saturate.
OTHER_EXACT = ("avx_vnni", "avx_vnni_int8", "amx_tile", "amx_int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "answer"),
    [
        ((), "exact"),
        (("avx512_vnni", *OTHER_EXACT), "saturated"),
        (("avx512f", *OTHER_EXACT), "saturated"),
        (("avx", "avx2", "fma", "avx512f"), "exact"),
    ],
)
def test_a_lesser_cpu_runs_lesser_kernels(maskable: None, features: tuple[str, ...], answer: str) -> None:
    with start_guest(build_masked_command(features), "masked") as guest:
        seen = guest.features(features)
        assert seen["trapped"] > 0
        assert not set(features) & set(seen["features"])
        assert sums(guest) == answer


@pytest.mark.slow
def test_a_masked_cpu_answers_as_an_emulated_one(maskable: None, haswell: str, tmp_path: Path) -> None:
    """A masked CPU and an emulated AVX2 machine agree to the last bit. They differ from this machine if products
    saturate.
    """
    random_model = _benchmark_models()
    emulated = build_command(load_emulators()["x86_64"], haswell)
    differing = 0
    with (
        start_guest(build_masked_command(("avx512f", *OTHER_EXACT)), "masked") as left,
        start_guest(emulated, "emulated") as right,
        start_guest(build_masked_command(()), "this machine") as here,
    ):
        for seed in range(18):
            case = random_model(seed)
            file = tmp_path / f"{seed}.onnx"
            file.write_bytes(case.model)
            answers = [
                guest.open(file, SessionSettings(intra_op_threads=1)).run(None, case.inputs)[0]
                for guest in (left, right, here)
            ]
            np.testing.assert_array_equal(answers[0], answers[1], err_msg=f"{case.kind}, seed {seed}")
            differing += not np.array_equal(answers[0], answers[2])
    assert differing > 6


def _benchmark_models():  # type: ignore[no-untyped-def]
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "integer_models.py"
    spec = importlib.util.spec_from_file_location("integer_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["integer_models"] = module
    spec.loader.exec_module(module)
    return module.random_model
