"""The command line. The file of a command is imported only when that command runs, so that `--help` is instant."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from edgeq import __version__
from edgeq.errors import UsageError, suggest
from edgeq.util.process import begin, ends_in_one_line

# File → command → its one-line help. Standing here so that `edgeq --help` need not import the files.
FILES = {
    "build": {
        "quantize": "Quantize a model for a profile and prove the result.",
        "tune": "Find the best int8 model for this machine that keeps its accuracy.",
        "package": "Quantize and write a deployable bundle.",
    },
    "calibrate": {"calibrate": "Run the float model once over samples and keep the statistics."},
    "measure": {
        "verify": "Check a bundle: hashes, loading, self-test; on other kernels too.",
        "bench": "Measure latency and throughput of a model or a bundle.",
        "eval": "Measure accuracy of a model or a bundle on labelled data.",
    },
    "compare": {
        "compare": "Compare two models or bundles: size, accuracy, speed, coverage.",
        "gate": "Fail a build whose model is worse than a baseline.",
    },
    "explain": {
        "inspect": "Show a model's operators, shapes, MACs and what runs in int8 where.",
        "debug": "Find the layers that lose accuracy in a quantized model.",
        "report": "Write a bundle's report: one HTML file that opens offline.",
        "audit": "Tell which layers of a quantized model saturate where two products are added in 16 bits.",
    },
    "info": {
        "detect": "Show this machine and the profile that fits it.",
        "doctor": "Say what is installed and what works; with --gpu, run it.",
        "targets": "List deployment targets, or show one.",
        "profiles": "List hardware profiles, or show one with its reasons.",
        "preprocess": "List preprocessings, or show one's arithmetic.",
        "extensions": "List calibration methods, decoders, steps, recoveries and backends, plug-ins' too.",
    },
    "device": {
        "device": "List boards, make an environment on one over SSH, remove what edgeq keeps there.",
        "emulate": "Make the machines on which other targets' kernels run.",
    },
    "ship": {
        "sign": "Sign a bundle with a key, in the OpenSSF Model Signing format.",
        "push": "Upload a bundle to an OCI registry.",
        "pull": "Get a bundle from an OCI registry, by its digest.",
    },
    "convert": {
        "retarget": "Rewrite a quantized model for another runtime.",
        "emit-c": "Write the C of a model that was quantized for a systolic array.",
    },
    "demo": {"demo": "Run the main job on the embedded demo model."},
    "run": {"run": "Run what a recipe says: commands and their options in one TOML file."},
}
COMMANDS = {name: text for commands in FILES.values() for name, text in commands.items()}
GROUPS = {
    "Look": ("detect", "inspect", "doctor", "demo"),
    "Quantize": ("quantize", "tune", "package", "calibrate", "retarget", "run"),
    "Prove and measure": ("verify", "bench", "eval", "compare", "gate", "report", "debug", "audit"),
    "Sign and ship": ("sign", "push", "pull"),
    "Targets": ("targets", "profiles", "device", "emulate", "emit-c"),
    "Data and plug-ins": ("preprocess", "extensions"),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of `GROUPS`; click would sort them."""
        return [name for names in GROUPS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name` and return its command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        file = next(file for file, commands in FILES.items() if cmd_name in commands)
        command = getattr(importlib.import_module(f"edgeq.cli.{file}"), f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' short help from `GROUPS`, so that `edgeq --help` imports none of them."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS[name]) for name in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument; an unknown one is answered with those of about that name."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = suggest(args[0], COMMANDS)
            raise UsageError(f"No such command {args[0]!r}", near if "?" in near else "See `edgeq --help`")
        return super().resolve_command(ctx, args)

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
    group(prog_name="edgeq", obj=begin())
