"""Implement `edgeq sign`, `push` and `pull`, which sign and transfer bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgeq.cli._common import Printer, command
from edgeq.cli._next import fill_next, propose_check
from edgeq.cli._options import FORCE, OUTPUT, PATH, REQUIRE_SIGNATURE, TRUST, checked_reference


@command("sign")
@click.argument("bundle", type=OUTPUT)
@click.option(
    "--key", type=PATH, required=True, metavar="KEY.pem", help="Private key, on the curve P-256, P-384 or P-521."
)
@click.option(
    "--certificate",
    "certificates",
    type=PATH,
    multiple=True,
    metavar="CERT.pem",
    help="Certificate of the key, then those of its issuers. Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an existing signature.")
def sign_command(printer: Printer, bundle: Path, **options: Any) -> None:
    """Sign BUNDLE (a folder or an .edgeq file) in the OpenSSF Model Signing format, for `edgeq verify --trust`.

    For an encrypted key, set the password in $EDGEQ_KEY_PASSWORD.

    \b
    edgeq sign dist/ --key build.pem
    edgeq sign model.edgeq --key build.pem --certificate build.crt --certificate issuer.crt
    """
    from edgeq.bundle.sign import sign_bundle

    signed = sign_bundle(bundle, **options)
    by = f" and {signed.certificates} certificates" if signed.certificates else ""
    printer.lines(signed, [f"{bundle}: {signed.files} files signed", f"key {signed.key} ({signed.curve}){by}"])


@command("push")
@click.argument("bundle", type=PATH)
@click.argument("reference", metavar="REF", callback=checked_reference)
def push_command(printer: Printer, bundle: Path, reference: str) -> None:
    """Upload BUNDLE and its signature to an OCI registry. REF is HOST/REPOSITORY[:TAG].

    The command prints the reference with the digest, which `edgeq pull` needs. It uses the credentials of `docker
    login`. It fails if the registry accepts less than 1,000 bytes per second or does not answer within 60 s.

    \b
    edgeq push dist/ registry.example.com/models/net:1.2
    """
    from edgeq.bundle.transfer import push_bundle
    from edgeq.util.numbers import size

    pushed = push_bundle(bundle, reference, progress=printer.progress())
    signed = "signed" if pushed.signed else "not signed"
    sizes = f"{size(pushed.bytes)}, of which {size(pushed.uploaded)} were uploaded"
    fill_next(reference=pushed.reference, trust="KEY.pub" if pushed.signed else None)
    printer.lines(pushed, [f"{pushed.files} files, {signed}, {sizes}", pushed.reference])


@command("pull")
@click.argument("reference", metavar="REF@DIGEST", callback=checked_reference)
@click.option("-o", "--output", type=OUTPUT, required=True, metavar="DIR|FILE.edgeq", help="Path of the bundle.")
@TRUST
@REQUIRE_SIGNATURE
@FORCE
def pull_command(printer: Printer, reference: str, output: Path, **options: Any) -> None:
    """Download a bundle from an OCI registry, and check it as `verify` does. REF is HOST/REPOSITORY@sha256:….

    Unlike `verify`, the command does not load the models. It fails if the registry sends less than 1,000 bytes per
    second or does not answer within 60 s. On a device, use `edgeq_run.py pull` instead.

    \b
    edgeq pull registry.example.com/models/net@sha256:0123… -o dist/ --trust build.pub
    """
    from edgeq.bundle.transfer import pull_bundle

    pulled = pull_bundle(reference, output, progress=printer.progress(), **options)
    lines = [f"{output}: pulled, all hashes right", f"manifest sha256 {pulled.manifest_sha256}"]
    if pulled.signer is not None:
        lines.append(f"signed by {pulled.signer['trusted_by']} ({pulled.signer['key']})")
    printer.lines(pulled, lines)
    propose_check(output)
