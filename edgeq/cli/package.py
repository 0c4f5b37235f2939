"""edgeq package: quantize for one or more targets and write one bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Face, common
from edgeq.cli._options import PATH, build_options

if TYPE_CHECKING:
    from rich.console import Console

    from edgeq.pipeline.package import Packaged


@click.command("package")
@click.argument("model", type=PATH)
@click.option(
    "-t",
    "--target",
    "targets",
    multiple=True,
    default=("this-machine",),
    show_default=True,
    help="Target or profile name, or a .toml file. Repeatable.",
)
@click.option("-o", "--output", type=PATH, required=True, metavar="DIR|FILE.edgeq", help="The bundle.")
@click.option("--with-float", is_flag=True, help="Put the float32 model in, so that the device can time both.")
@click.option(
    "--selftest", type=click.IntRange(min=1), default=2, show_default=True, help="Samples that travel as test vectors."
)
@click.option("--no-emulate", is_flag=True, help="Do not run variants for other machines on their own kernels.")
@build_options
@common
def command(face: Face, model: Path, targets: tuple[str, ...], output: Path, **options: Any) -> None:
    """Quantize MODEL and write a bundle that a device can verify, run and time by itself.

    \b
    edgeq package model.onnx --data calib/ --preprocess imagenet -o dist/
    python dist/edgeq_run.py verify
    """
    from edgeq.pipeline.options import build_arguments
    from edgeq.pipeline.package import package

    extra = {name: options.pop(name) for name in ("with_float", "selftest")}
    extra["emulate"] = not options.pop("no_emulate")
    arguments = build_arguments(options)
    result = package(model, output=output, targets=targets, progress=face.progress(), **extra, **arguments)
    face.result(result.to_dict(), lambda console: _draw(console, result, verbose=face.verbose))


def _draw(console: Console, result: Packaged, *, verbose: bool) -> None:
    from edgeq.cli._proof import draw_proof
    from edgeq.emulate.verify import summary

    for name, variant in result.variants.items():
        scheme = variant.built.artifact.scheme
        console.print(f"{name}: {scheme.title}", style="bold", markup=False)
        if not variant.native:
            console.print("  checked on this machine's kernels, which are not the target's", markup=False)
        if variant.emulated is not None:
            for line in summary([variant.emulated]):
                console.print(f"  {line}", markup=False)
        draw_proof(console, variant.proof, verbose=verbose)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"bundle: {result.bundle}", markup=False)
