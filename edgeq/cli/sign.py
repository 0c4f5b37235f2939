"""`edgeq sign BUNDLE --key KEY`."""

from __future__ import annotations

from pathlib import Path

import click

from edgeq.cli._common import Printer, common
from edgeq.cli._options import OUTPUT, PATH


@click.command("sign")
@click.argument("bundle", type=OUTPUT)
@click.option("--key", type=PATH, required=True, metavar="KEY.pem", help="Private key on P-256, P-384 or P-521.")
@click.option(
    "--certificate",
    "certificates",
    type=PATH,
    multiple=True,
    metavar="CERT.pem",
    help="The key's certificate, then its issuers'. Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace the signature that it has.")
@common
def command(printer: Printer, bundle: Path, key: Path, certificates: tuple[Path, ...], force: bool) -> None:
    """Sign BUNDLE (a directory or an .edgeq file) in the OpenSSF Model Signing format, for `edgeq verify --trust`.

    An encrypted key is opened with the password in $EDGEQ_KEY_PASSWORD.

    \b
    edgeq sign dist/ --key build.pem
    edgeq sign model.edgeq --key build.pem --certificate build.crt --certificate issuer.crt
    """
    from edgeq.bundle.write import sign_bundle

    signed = sign_bundle(bundle, key, certificates=certificates, force=force)
    by = f" and {signed.certificates} certificates" if signed.certificates else ""
    printer.lines(signed, [f"{bundle}: {signed.files} files signed", f"key {signed.key} ({signed.curve}){by}"])
