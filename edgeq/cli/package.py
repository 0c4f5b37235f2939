"""edgeq package: quantize for one or more targets and write one bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeq.cli._common import Lines, Printer, common, styled
from edgeq.cli._next import choose_next
from edgeq.cli._options import OUTPUT, PATH, build_options, target_option

if TYPE_CHECKING:
    from edgeq.jobs.package import Packaged
    from edgeq.measure.coverage import Check


@click.command("package")
@click.argument("model", type=PATH)
@target_option(
    "targets",
    multiple=True,
    default=("this-machine",),
    show_default=True,
    help="A target (`edgeq targets`), a profile (`edgeq profiles`), or a .toml file. Repeatable.",
)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR|FILE.edgeq", help="The bundle.")
@click.option("--with-float", is_flag=True, help="Put the float32 model in, so that the device can time both.")
@click.option(
    "--selftest", type=click.IntRange(min=1), default=2, show_default=True, help="Samples that travel as test vectors."
)
@click.option("--split", is_flag=True, help="One bundle for each target, OUTPUT/NAME.edgeq, instead of one for all.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="ENGINE",
    help="Add a variant that this plug-in runs, as NAME or NAME:PRECISION. Repeatable, the best first.",
)
@build_options
@common
def command(
    printer: Printer, model: Path, targets: tuple[str, ...], engines: tuple[str, ...], output: Path, **options: Any
) -> None:
    """Quantize MODEL and write a bundle that a device can verify, run and time by itself.

    \b
    edgeq package model.onnx --data calib/ --preprocess imagenet -o dist/
    edgeq package model.onnx --data calib/ -t raspberry-pi-5 -t haswell -t cascade-lake -o dist/
    edgeq package model.onnx --data calib/ --engine openvino -o dist/
    python dist/edgeq_run.py verify
    """
    from edgeq.emulate.check import next_check
    from edgeq.jobs.emulated import SIMULATORS
    from edgeq.jobs.job import build_arguments
    from edgeq.jobs.package import package
    from edgeq.run.engines import choose_engine

    extra = {name: options.pop(name) for name in ("with_float", "selftest", "split")}
    arguments = build_arguments(options)
    chosen = [choose_engine(text) for text in engines]
    result = package(
        model, output=output, targets=targets, engines=chosen, progress=printer.progress(), **extra, **arguments
    )
    printer.lines(result, _draw(result, verbose=printer.verbose))
    bundle = next(iter(result.bundles.values()))
    choose_next(lambda: next_check(bundle, SIMULATORS, targets), bundle=bundle)


def _draw(result: Packaged, *, verbose: bool) -> Lines:
    from edgeq.cli._proof import draw_decision, draw_proof

    drawn: dict[tuple[Path, str], str] = {}
    for name, variant in result.variants.items():
        artifact = variant.built.artifact
        engine = f" in {artifact.plugin.name}" if artifact.plugin is not None else ""
        size = f"{variant.bytes / 1e6:.2f} MB, onnxruntime {variant.min_onnxruntime} or newer"
        yield styled(f"{name}: {artifact.scheme.title}{engine}, {size}", "bold")
        if (artifact.model, engine) in drawn:
            yield f"  the same model as {drawn[artifact.model, engine]}"
        else:
            drawn[artifact.model, engine] = name
            yield from draw_proof(variant.proof, verbose=verbose)
        if variant.decision is not None:
            yield from draw_decision(variant.decision, verbose=verbose)
        yield from _draw_checks(variant.checks, verbose=verbose)
    yield from (f"note: {note}" for note in result.notes)
    yield from (f"bundle: {bundle}" for bundle in dict.fromkeys(result.bundles.values()))


def _draw_checks(checks: Sequence[Check], *, verbose: bool) -> Lines:
    """What was checked, and on whose kernels; in one line, or one line each."""
    from edgeq.measure.coverage import summarise

    if verbose:
        for check in checks:
            yield f"  {check.name}: {check.kind} ({check.where}) {check.detail}"
        return
    yield f"checked {summarise(checks)}"
