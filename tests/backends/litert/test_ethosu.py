"""Test vela in a process: its summary, the operators that stay on the CPU, and every failure."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from edgeq.backends.litert import ethosu
from edgeq.backends.litert.ethosu import CpuOperator, compile_for, version
from edgeq.errors import EngineError, HardwareError, RuntimeUnavailableError
from edgeq.hardware.target import load_targets
from edgeq.util.records import plain

OPTIONS = {
    "accelerator-config": "ethos-u55-128",
    "config": "Arm/vela.ini",
    "system-config": "Ethos_U55_High_End_Embedded",
    "memory-mode": "Shared_Sram",
}
ROW = {
    "system_config": "S",
    "memory_mode": "M",
    "cycles_total": "3595.0",
    "cycles_npu": "2995",
    "inference_time": "7.19e-06",
    "sram_memory_used": "2.15625",
    "dram_memory_used": "0.0",
    "off_chip_flash_memory_used": "1.5",
    "on_chip_flash_memory_used": "0.5",
    "nn_macs": "18994",
}
LOG = """
Warning (supported operators) operator: FLOOR_MOD, ofm: 'z'
Reason: Unsupported opType

CPU operators = 1 (2.9%)
   CPU: Passthrough = z (outputs [1, 1, 1, 5])
NPU operators = 33 (97.1%)
"""
FAKE = """#!{python}
import sys
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    print("9.9.9")
    raise SystemExit
{behaviour}
out = Path(sys.argv[sys.argv.index("--output-dir") + 1])
out.mkdir()
(out / "model_vela.tflite").write_bytes(Path(sys.argv[1]).read_bytes() + b"compiled")
(out / "model_summary_S.csv").write_text({summary!r})
print({log!r})
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "any name.tflite"
    file.write_bytes(b"....TFL3")
    return file


def install(folder: Path, patch: pytest.MonkeyPatch, behaviour: str = "", row: dict[str, str] | None = None) -> None:
    """Make a stand-in for vela the only program on PATH."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    cells = ROW if row is None else row
    summary = f"{','.join(cells)}\n{','.join(cells.values())}\n"
    program = bin_folder / "vela"
    program.write_text(FAKE.format(python=sys.executable, behaviour=behaviour, summary=summary, log=LOG))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    patch.setattr(ethosu.sys, "executable", str(folder / "nowhere" / "python"))
    patch.setenv("PATH", str(bin_folder))


def test_the_estimate_is_velas_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    install(tmp_path, monkeypatch)
    found = compile_for(model, OPTIONS, tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").read_bytes() == b"....TFL3compiled"
    assert (found.basis, found.cycles, found.npu_cycles, found.flash_kib) == ("vela 9.9.9's estimate", 3595, 2995, 2.0)
    assert (found.npu_operators, found.cpu_operators) == (33, 1)
    assert found.on_cpu == (CpuOperator("FLOOR_MOD", "z", "Unsupported opType"),)
    assert found.notes()[1:] == (
        "edgeq does not know whether the model fits: the target's file has no [device.memories]",
        "vela counts the operators that stay on the CPU (1) as 0 cycles",
        "FLOOR_MOD (z) stays on the CPU: Unsupported opType",
    )
    assert "3,595 cycles, 0.01 ms on the NPU alone, SRAM 2 KiB, flash 2 KiB" in str(found)
    assert plain(found)["on_cpu"] == [{"operator": "FLOOR_MOD", "output": "z", "reason": "Unsupported opType"}]


@pytest.mark.parametrize(
    ("behaviour", "row", "says"),
    [
        ("sys.exit('Error: no such memory mode')", None, r"vela failed \(exit code 1\): Error: no such memory mode"),
        ("import os; os.abort()", None, r"vela failed \(signal 6\)"),
        ("import time; time.sleep(60)", None, "did not end within 1 s"),
        ("raise SystemExit", None, "vela 9.9.9 ended without a compiled file"),
        ("", {"system_config": "S"}, "vela 9.9.9 writes another summary than version 5.2.0"),
        ("", {**ROW, "cycles_total": "nan"}, "vela 9.9.9 writes another summary than version 5.2.0"),
    ],
)
def test_reports_failures_of_vela_in_one_line(
    behaviour: str,
    row: dict[str, str] | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
) -> None:
    install(tmp_path, monkeypatch, behaviour, row)
    monkeypatch.setattr(ethosu, "_SECONDS", 1)
    with pytest.raises(EngineError, match=says):
        compile_for(model, OPTIONS, tmp_path / "out.tflite")
    assert not (tmp_path / "out.tflite").exists()


@pytest.mark.parametrize(
    ("memories", "says"),
    [
        ({"sram_kib": 3, "flash_kib": 2}, []),
        ({"sram_kib": 3}, []),
        ({"sram_kib": 2, "flash_kib": 2}, ["needs 3 KiB of SRAM, and the target has 2 KiB"]),
        ({"sram_kib": 1, "flash_kib": 1}, ["3 KiB of SRAM, and the target has 1 KiB", "2 KiB of flash"]),
    ],
)
def test_a_model_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, memories: dict[str, int], says: list[str]
) -> None:
    install(tmp_path, monkeypatch)
    found = compile_for(model, OPTIONS, tmp_path / "out.tflite", memories)
    lines = [note for note in found.notes() if "does not fit" in note]
    assert len(lines) == len(says)
    assert all(text in line for text, line in zip(says, lines, strict=True))
    assert f"SRAM 2 of {memories['sram_kib']} KiB" in str(found)
    assert plain(found)["sram_limit_kib"] == memories["sram_kib"]


def test_it_need_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(ethosu.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailableError, match=r"is not installed[.] Install it: python -m pip"):
        compile_for(model, OPTIONS, tmp_path / "out.tflite")


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_nothing_is_left_to_velas_defaults(name: str, tmp_path: Path, model: Path) -> None:
    with pytest.raises(HardwareError, match=f"vela needs {name}. Set it in"):
        compile_for(model, {**OPTIONS, name: ""}, tmp_path / "out.tflite")


def test_every_target_with_an_npu_gives_all_options() -> None:
    targets = [t for t in load_targets().values() if "accelerator-config" in t.device.get("engine_options", {})]
    assert {t.device["engine_options"]["accelerator-config"] for t in targets} >= {
        *(f"ethos-u55-{size}" for size in (32, 64, 128, 256)),
        *(f"ethos-u65-{size}" for size in (256, 512)),
        *(f"ethos-u85-{size}" for size in (128, 256, 512, 1024, 2048)),
    }
    assert all(t.device["engine_options"].keys() == OPTIONS.keys() for t in targets)


def test_velas_own_version_is_read() -> None:
    try:
        assert version().startswith("vela ")
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
