"""Opening a bundle on the workstation: the device's own reader, its errors as edgeq's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeq_device.manifest import MANIFEST
from edgeq_device.package import Bundle, open_bundle
from edgeq_device.signature import SIGNATURE

from edgeq.device import device_errors


@contextmanager
def opened(path: Path, *, expect: str | None = None) -> Iterator[Bundle]:
    """The bundle at `path` (a directory or an .edgeq file), checked; errors of the device side inside are translated.

    Args:
        expect: the sha256 that its manifest must have.

    Raises:
        BundleError: names, sizes, hashes or keys that are not right.
    """
    with device_errors(), open_bundle(path, expect=expect) as bundle:
        yield bundle


def contents(bundle: Bundle) -> dict[str, bytes | Path]:
    """Path inside the bundle → bytes, or the file that has them, of all that it consists of; sorted by path."""
    found: dict[str, bytes | Path] = {name: bundle.root / name for name in bundle.files}
    found[MANIFEST] = bundle.manifest
    if bundle.signature is not None:
        found[SIGNATURE] = bundle.signature
    return dict(sorted(found.items()))
