"""`edgeq pull REF@sha256:… -o BUNDLE`."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._next import choose_next
from edgeq.cli._options import FORCE, OUTPUT, REQUIRE_SIGNATURE, TRUST, checked_reference


@click.command("pull")
@click.argument("reference", metavar="REF@DIGEST", callback=checked_reference)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR|FILE.edgeq", help="The bundle.")
@TRUST
@REQUIRE_SIGNATURE
@FORCE
@common
def command(
    printer: Printer, reference: str, output: Path, trust: Path | None, require_signature: bool, force: bool
) -> None:
    """Get the bundle at REF, HOST/REPOSITORY@sha256:…, from an OCI registry, with every check that `verify` makes.

    Nothing of it is loaded. A device does the same with `edgeq_run.py pull`.
    A registry that sends under 1,000 bytes a second, or does not answer within 60 s, ends the command.

    \b
    edgeq pull registry.example.com/models/net@sha256:0123… -o dist/ --trust build.pub
    """
    from edgeq.backends.base import SIMULATORS
    from edgeq.bundle.transfer import pull_bundle
    from edgeq.emulate.check import next_check

    pulled = pull_bundle(
        reference,
        output,
        trust=trust,
        require_signature=require_signature,
        force=force,
        progress=printer.progress(),
    )
    lines = [f"{output}: pulled, all hashes right", f"manifest sha256 {pulled.manifest_sha256}"]
    if pulled.signer is not None:
        lines.append(f"signed by {pulled.signer['trusted_by']} ({pulled.signer['key']})")
    printer.lines(pulled, lines)
    choose_next(lambda: next_check(output, SIMULATORS), bundle=output)
