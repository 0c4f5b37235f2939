"""Compile a .tflite file for Arm's Ethos-U with vela, which runs in its own process, and read vela's estimates.

The compiled file needs the NPU: no interpreter on this machine supports its NPU operator. So the uncompiled file ships
with it, and edgeq checks the answers of the uncompiled file.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from edgeq_device.system.budget import without_seconds
from edgeq_device.system.files import open_file
from edgeq_device.system.places import scratch_folder
from edgeq_device.system.programs import build_child_environment, find_program
from msgspec import Meta

from edgeq.backends.litert.memory import lacking_memories, of_limit
from edgeq.errors import EngineError, HardwareError, RuntimeUnavailableError, one_line
from edgeq.util.display import Displayed
from edgeq.util.records import Amount, Count

PROGRAM = "vela"
_INSTALL = (
    "Install it: python -m pip install ethos-u-vela; or in an environment of its own, whose bin folder is in PATH"
)
# All four decide the figures, and vela's defaults match no particular chip.
_OPTIONS = ("accelerator-config", "config", "system-config", "memory-mode")
# Far more than a model for a microcontroller needs; it ends a vela that hangs.
_SECONDS = 600
# A log that never ends must not fill the memory.
_MOST_TEXT = 1 << 22
# Starting vela compiles its Python files the first time.
_VERSION_S = 60
# Notes are for reading; the JSON has all operators.
_MOST_NAMED = 5
NO_MEMORIES: Mapping[str, Any] = MappingProxyType({})
Text = Annotated[str, Meta(max_length=4096)]


@dataclass(frozen=True)
class CpuOperator:
    """Describe an operator that stays on the CPU: its type, its output tensor, and vela's reason."""

    operator: Text
    output: Text
    reason: Text


@dataclass(frozen=True)
class VelaEstimate(Displayed):
    """Hold vela's estimates for one inference. None of them was measured.

    Attributes:
        basis: the source of the estimate.
        accelerator, config, system_config, memory_mode: options of vela, which decide the figures.
        cycles: cycles of one inference, including all memory accesses. Operators on the CPU count as 0.
        npu_cycles: cycles of the NPU's own work.
        ms: time of one inference at the clock rate of `system_config`.
        sram_kib, dram_kib, flash_kib: memory in use, KiB.
        sram_limit_kib, flash_limit_kib: memory of the target, KiB; None if the target's file does not state it.
        npu_operators, cpu_operators: number of operators of the compiled graph on the NPU and on the CPU.
        on_cpu: the operators that stay on the CPU, each with the reason.
    """

    basis: Text
    accelerator: Text
    config: Text
    system_config: Text
    memory_mode: Text
    cycles: Count
    npu_cycles: Count
    ms: Amount
    sram_kib: Amount
    dram_kib: Amount
    flash_kib: Amount
    macs: Count
    npu_operators: Count
    cpu_operators: Count
    on_cpu: tuple[CpuOperator, ...] = field(default=())
    sram_limit_kib: Amount | None = None
    flash_limit_kib: Amount | None = None

    def __str__(self) -> str:
        memory = f"SRAM {of_limit(self.sram_kib, self.sram_limit_kib)}"
        memory += f", DRAM {self.dram_kib:.0f} KiB" if self.dram_kib else ""
        memory += f", flash {of_limit(self.flash_kib, self.flash_limit_kib)}" if self.flash_kib else ""
        configuration = f"{self.accelerator}, {self.system_config}, {self.memory_mode}"
        only = " on the NPU alone" if self.cpu_operators else ""
        return f"{self.basis}: {self.cycles:,} cycles, {self.ms:.2f} ms{only}, {memory} ({configuration})"

    def notes(self) -> tuple[str, ...]:
        """Return sentences with the estimate, the memories that are too small, and the operators that stay on the CPU.
        A long list of operators is cut short.
        """
        named = self.on_cpu[:_MOST_NAMED]
        listed = [f"{operator.operator} ({operator.output}) stays on the CPU: {operator.reason}" for operator in named]
        more = self.cpu_operators - len(named)
        listed += [f"{more} more operators stay on the CPU; the JSON names them"] if more > 0 else []
        if self.cpu_operators:
            listed.insert(0, f"vela counts the operators that stay on the CPU ({self.cpu_operators}) as 0 cycles")
        memories = [("SRAM", self.sram_kib, self.sram_limit_kib), ("flash", self.flash_kib, self.flash_limit_kib)]
        return str(self), *lacking_memories(memories), *listed


def compile_for(
    model: Path, options: Mapping[str, str], destination: Path, memories: Mapping[str, Any] = NO_MEMORIES
) -> VelaEstimate:
    """Compile `model` with vela and write the result to `destination`.

    Args:
        options: vela's "accelerator-config", "config", "system-config" and "memory-mode". All are required, because
            they affect the result, and vela's defaults match no particular chip.
        memories: the target's "sram_kib" and "flash_kib", if they are known.

    Raises:
        RuntimeUnavailableError: vela is not installed.
        HardwareError: an option is missing.
        EngineError: vela fails, crashes, does not end, or writes output that edgeq cannot read.
    """
    missing = [name for name in _OPTIONS if not options.get(name)]
    if missing:
        problem = f"vela needs {', '.join(missing)}"
        raise HardwareError(problem, "Set it in [device] engine_options of the target's file")
    program = find_vela()
    # vela writes into its working folder.
    with scratch_folder("edgeq-vela-") as place:
        folder = Path(place)
        network = folder / "model.tflite"
        shutil.copyfile(model, network)
        arguments = [part for name in _OPTIONS for part in (f"--{name}", options[name])]
        text = _run(
            [program, network.name, "--output-dir", "out", "--show-cpu-operations", *arguments], folder, _SECONDS
        )
        compiled = folder / "out" / "model_vela.tflite"
        # The name of the summary contains the name of the system configuration.
        summaries = sorted((folder / "out").glob("model_summary_*.csv"))
        # The exit status alone does not show that a network was written.
        if not compiled.is_file() or len(summaries) != 1:
            raise EngineError(f"{version()} ended without a compiled file or its summary", "Try vela 5.2.0")
        estimate = replace(
            _parse_estimate(summaries[0], text, options),
            sram_limit_kib=memories.get("sram_kib"),
            flash_limit_kib=memories.get("flash_kib"),
        )
        shutil.copyfile(compiled, destination)
    return estimate


def find_vela() -> str:
    """Return the path of vela, from the folder of this Python or else from PATH.

    Raises:
        RuntimeUnavailableError: vela is in neither of them.
    """
    # This Python's folder comes first, so a virtual environment uses its own vela even if it is not activated.
    path = find_program(PROGRAM, Path(sys.executable).parent)
    if path is None:
        raise RuntimeUnavailableError("vela, which compiles for Ethos-U, is not installed", _INSTALL)
    return path


def version() -> str:
    """Return vela's name and version, for example "vela 5.2.0".

    Raises:
        RuntimeUnavailableError: vela is not installed.
        EngineError: vela does not start.
    """
    with scratch_folder("edgeq-vela-") as folder:
        text = _run([find_vela(), "--version"], Path(folder), _VERSION_S)
    return f"vela {text.strip().splitlines()[-1]}" if text.strip() else "vela"


def _run(command: list[str], folder: Path, seconds: float) -> str:
    """Run `command` and return its output."""
    try:
        # The limit on this process's CPU time would also apply to its children.
        with without_seconds():
            process = subprocess.run(
                command,
                cwd=folder,
                env=build_child_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
    except OSError as error:
        raise RuntimeUnavailableError(f"vela cannot be started ({error.strerror})", _INSTALL) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"vela did not end within {seconds:g} s", "Compile a smaller model") from error
    if process.returncode:
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        message = one_line(lines[-1], most=300) if lines else ""
        ending = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise EngineError(
            f"vela failed ({ending}): {message}", "Run it by hand on the uncompiled file to see its full output"
        )
    text: str = process.stdout[:_MOST_TEXT].decode("utf-8", "replace")
    return text


# The log has what the summary leaves out: which operators stay on the CPU, and why.
_COUNTS = re.compile(r"^(CPU|NPU) operators = (\d{1,9})", re.MULTILINE)
_ON_CPU = re.compile(r"operator: (\S+), (?:\w+: )?'([^'\n]*)'[^\n]*\n\s*(?:- )?(?:Reason: )?([^\n]*)")


def _parse_estimate(summary: Path, text: str, options: Mapping[str, str]) -> VelaEstimate:
    """Return the estimate from vela's summary file, which has one row, and from vela's log."""
    counts = dict(_COUNTS.findall(text))
    try:
        with io.TextIOWrapper(open_file(summary), "utf-8", newline="") as file:
            row = next(csv.DictReader(file))
        return VelaEstimate(
            basis=f"{version()}'s estimate",
            accelerator=options["accelerator-config"],
            config=options["config"],
            system_config=row["system_config"],
            memory_mode=row["memory_mode"],
            cycles=round(float(row["cycles_total"])),
            npu_cycles=round(float(row["cycles_npu"])),
            ms=1e3 * float(row["inference_time"]),
            sram_kib=float(row["sram_memory_used"]),
            dram_kib=float(row["dram_memory_used"]),
            flash_kib=float(row["off_chip_flash_memory_used"]) + float(row["on_chip_flash_memory_used"]),
            macs=round(float(row["nn_macs"])),
            npu_operators=int(counts["NPU"]),
            cpu_operators=int(counts["CPU"]),
            on_cpu=tuple(CpuOperator(*fields) for fields in _ON_CPU.findall(text)),
        )
    # Each of these means another form of the summary or the log than that of the version that this code was written
    # for.
    except (KeyError, OSError, ValueError, StopIteration) as error:
        problem = f"{version()} writes another summary than version 5.2.0 ({type(error).__name__}: {error})"
        raise EngineError(problem, "Try vela 5.2.0") from error
