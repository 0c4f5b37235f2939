"""The command line. One file a command, imported only when that command runs, so that `--help` is instant."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from edgeq import __version__
from edgeq.process import ends_in_one_line, restore_interrupts

# Command → its one-line help. Standing here so that `edgeq --help` need not import fifteen modules.
COMMANDS = {
    "detect": "Show this machine and the profile that fits it.",
    "profiles": "List hardware profiles, or show one with its reasons.",
    "targets": "List deployment targets, or show one.",
    "inspect": "Show a model's operators, shapes, MACs and what runs in int8 where.",
    "calibrate": "Run the float model once over samples and keep the statistics.",
    "tune": "Find the best int8 model for this machine that keeps its accuracy.",
    "quantize": "Quantize a model for a profile and prove the result.",
    "retarget": "Rewrite a quantized model for another runtime.",
    "package": "Quantize and write a deployable bundle.",
    "emit-c": "Write the C of a model that was quantized for a systolic array.",
    "verify": "Check a bundle: hashes, loading, self-test; on other kernels too.",
    "emulate": "Make the machines on which other targets' kernels run.",
    "bench": "Measure latency and throughput of a model or a bundle.",
    "audit": "Tell which layers of a quantized model saturate where two products are added in 16 bits.",
    "debug": "Find the layers that lose accuracy in a quantized model.",
    "eval": "Measure accuracy of a model or a bundle on labelled data.",
    "compare": "Compare two models or bundles: size, accuracy, speed, coverage.",
    "report": "Write a bundle's report: one HTML file that opens offline.",
    "preprocess": "List preprocessings, or show one's arithmetic.",
    "extensions": "List calibration methods, decoders, steps, recoveries and backends, plug-ins' too.",
    "run": "Run what a recipe says: commands and their options in one TOML file.",
    "doctor": "Say what is installed and what works; with --gpu, run it.",
    "demo": "Run the main job on the embedded demo model.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of `COMMANDS`; click would sort them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name` and return its command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"edgeq.cli.{cmd_name.replace('-', '_')}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' short help from `COMMANDS`, so that `edgeq --help` imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **options: Any) -> Any:
        """Run one command and exit, whatever happens with one line at most."""
        with ends_in_one_line():
            code = super().main(*args, **{**options, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgeq")
def group() -> None:
    """Quantize ONNX models for the hardware they will run on, prove the result, ship it as a bundle."""


def main() -> None:
    """The `edgeq` program."""
    restore_interrupts()
    # As targets/runtime/edgeq_run.py does on devices: onnxruntime's wheels report their use to their maker otherwise.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    group(prog_name="edgeq")
