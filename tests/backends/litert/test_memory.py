"""Test the forecast of the memories that a model needs on a microcontroller."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgeq
from edgeq.backends.litert.memory import MemoryForecast, lacking_memories
from edgeq.cli import group
from edgeq.hardware.target import load_targets, resolve
from tests.backends.litert.files import installed, litert
from tests.backends.litert.test_backend import model_and_data
from tests.opened import variant_info

micro = pytest.mark.skipif(not installed("tflite_micro"), reason="tflite-micro is not installed")


def forecast(arena: int = 24 * 1024, file: int = 44 * 1024, **memories: Any) -> MemoryForecast:
    """Return a forecast for a target with these memories."""
    target = replace(resolve("cortex-m7"), name="board", device={"memories": memories})
    return MemoryForecast.of(arena, file, target, "a runtime")


def test_a_forecast_names_what_the_target_has() -> None:
    (line,) = forecast(sram_kib=64, flash_kib=512).notes()
    assert line == (
        "memory of board: RAM 24 of 64 KiB (the arena that a runtime needed on this machine), flash 44 of 512 KiB "
        "(the file)"
    )


def test_a_memory_that_is_too_small_is_named() -> None:
    _, problem = forecast(sram_kib=16, flash_kib=512).notes()
    assert "needs 24 KiB of RAM, and the target has 16 KiB" in problem
    _, problem = forecast(sram_kib=64, flash_kib=32).notes()
    assert "needs 44 KiB of flash, and the target has 32 KiB" in problem


def test_memories_that_the_target_does_not_state_are_not_judged() -> None:
    line, unknown = forecast().notes()
    assert "RAM 24 KiB" in line
    assert "does not know whether the model fits" in unknown
    assert next(lacking_memories([("RAM", 5.0, 4.0), ("flash", 5.0, None)])).startswith("the model does not fit")


def test_every_microcontroller_states_its_memory() -> None:
    micros = {name: t.device for name, t in load_targets().items() if t.device.get("engine") == "tflite-micro"}
    unknown = {name for name, device in micros.items() if "sram_kib" not in device.get("memories", {})}
    # No chip with an Ethos-U85 is known here, so a note says that the memory is not known.
    assert unknown == {f"ethos-u85-{macs}" for macs in (128, 256, 512, 1024, 2048)}
    assert len(micros) > len(unknown)


@litert
@micro
def test_quantize_prints_the_memory(tmp_path: Path) -> None:
    model, data = model_and_data(tmp_path)
    command = ["quantize", str(model), "--data", str(data), "-t", "cortex-m7", "--no-timing", "--as-is"]
    shown = CliRunner().invoke(group, [*command, "-o", str(tmp_path / "a.tflite")])
    (line,) = (line for line in shown.output.splitlines() if "memory of cortex-m7" in line)
    assert "of 512 KiB (the arena" in line
    stated = CliRunner().invoke(group, [*command, "-o", str(tmp_path / "b.tflite"), "--json"])
    estimate = json.loads(stated.stdout)["estimate"]
    assert estimate["file_bytes"] == (tmp_path / "b.tflite").stat().st_size
    assert estimate["arena_bytes"] % 1024 == 0
    assert f"RAM {estimate['arena_bytes'] // 1024} of 512 KiB" in line


@litert
@micro
def test_package_states_the_arena_of_its_sources(tmp_path: Path) -> None:
    model, data = model_and_data(tmp_path)
    report = edgeq.package(model, data, tmp_path / "dist", targets=["cortex-m7", "android-xnnpack"], timed=False)
    assert sum("memory of" in note for note in report.notes) == 1
    estimate = variant_info(tmp_path / "dist", "cortex-m7")["estimate"]
    header = (tmp_path / "dist" / "files" / "cortex-m7" / "micro" / "model.h").read_text()
    assert f"kEdgeqArenaBytes = {estimate['arena_bytes']};" in header
