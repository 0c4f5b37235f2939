"""`edgeq push BUNDLE REF`."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._next import fill_next
from edgeq.cli._options import PATH, checked_reference


@click.command("push")
@click.argument("bundle", type=PATH)
@click.argument("reference", metavar="REF", callback=checked_reference)
@common
def command(printer: Printer, bundle: Path, reference: str) -> None:
    """Upload BUNDLE, with its signature, to the OCI registry at REF, as HOST/REPOSITORY[:TAG].

    It prints the reference by digest, which is what `edgeq pull` takes. Logins are those of `docker login`.
    A registry that takes under 1,000 bytes a second, or does not answer within 60 s, ends the command.

    \b
    edgeq push dist/ registry.example.com/models/net:1.2
    """
    from edgeq.bundle.transfer import push_bundle

    pushed = push_bundle(bundle, reference, progress=printer.progress())
    signed = "signed" if pushed.signed else "not signed"
    size = f"{pushed.bytes / 1e6:.2f} MB, {pushed.uploaded / 1e6:.2f} MB of them new there"
    fill_next(reference=pushed.reference, trust="KEY.pub" if pushed.signed else None)
    printer.lines(pushed, [f"{pushed.files} files, {signed}, {size}", pushed.reference])
