"""`edgeq sign`: a bundle's signature, written into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgeq_device.manifest import MANIFEST
from edgeq_device.signature import SIGNATURE

from edgeq.atomic import output_file
from edgeq.bundle.owned import is_signature
from edgeq.bundle.read import contents, opened
from edgeq.bundle.write import write_archive
from edgeq.display import Displayed
from edgeq.errors import OutputError
from edgeq.model.path import path_of
from edgeq.signing.sign import read_signing_key, sign_files


@dataclass(frozen=True)
class Signed(Displayed):
    """What `sign_bundle` did: how many files the signature covers, and the id of the key (docs/signing.md)."""

    bundle: Path
    files: int
    key: str
    curve: str
    certificates: int


def sign_bundle(
    path: str | Path, key: str | Path, *, certificates: Sequence[str | Path] = (), force: bool = False
) -> Signed:
    """Sign the bundle at `path`: `model.sig` beside its manifest, in a directory as in an .edgeq file.

    Args:
        key: private key, PEM.
        certificates: see `read_signing_key`.
        force: replace the signature that it has.

    Raises:
        BundleError: it is no bundle, or a damaged one.
        OutputError: it is signed already, or cannot be written.
        DataError, UsageError, RuntimeUnavailableError: see `read_signing_key`.
    """
    path = path_of(path, "bundle")
    signing = read_signing_key(Path(key), [Path(certificate) for certificate in certificates])
    with opened(path) as bundle:
        if bundle.signature is not None and not force:
            raise OutputError(f"{path} is signed already", "Pass --force to replace its signature")
        digests = {name: record.sha256 for name, record in bundle.files.items()}
        digests[MANIFEST] = bundle.manifest_sha256
        signature = sign_files(digests, bundle.name or path.stem, signing)
        if path.is_dir():
            place = path / SIGNATURE
            if place.exists() and not is_signature(place):
                raise OutputError(f"{place} is no signature", "Move it")
            with output_file(place, force=force) as draft:
                draft.write_bytes(signature)
        else:
            with output_file(path, force=True) as draft:
                write_archive(contents(replace(bundle, signature=signature)), draft)
    return Signed(path, len(digests), signing.public.id, signing.public.curve.name, len(signing.chain))
