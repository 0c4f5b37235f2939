"""Exchange signatures with the reference package, model-signing, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography")
pytest.importorskip("model_signing", reason="model-signing is not installed: pip install model-signing pyOpenSSL")

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import model_signing
    import model_signing.signing
    import model_signing.verifying

from edgeq.bundle.sign import sign_bundle
from edgeq.bundle.verify import check_trusted
from edgeq.errors import BundleError

from .keys import CURVES, write_chain, write_key

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("curve", CURVES)
def test_a_key(curve: str, copy: Path, tmp_path: Path) -> None:
    key = write_key(tmp_path, curve=curve)
    other = write_key(tmp_path, "other", curve)
    place = copy / "model.sig"

    sign_bundle(copy, key)
    verifier = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub"))
    verifier.verify(copy, place)
    with pytest.raises(ValueError, match="mismatch"):
        model_signing.verifying.Config().use_elliptic_key_verifier(public_key=other.with_suffix(".pub")).verify(
            copy, place
        )

    place.unlink()
    model_signing.signing.Config().use_elliptic_key_signer(private_key=key).sign(copy, place)
    check_trusted(copy, trust=key.with_suffix(".pub"), required=True, expect=None)
    with pytest.raises(BundleError, match="not signed by a key of"):
        check_trusted(copy, trust=other.with_suffix(".pub"), required=True, expect=None)
    (copy / "report.txt").write_text("a note next to the bundle is none of its files")
    check_trusted(copy, trust=key.with_suffix(".pub"), required=True, expect=None)


def test_a_certificate(copy: Path, tmp_path: Path) -> None:
    key, own, issuer, root = write_chain(tmp_path)
    place = copy / "model.sig"

    sign_bundle(copy, key, certificates=[own, issuer])
    model_signing.verifying.Config().use_certificate_verifier(certificate_chain=[root]).verify(copy, place)

    place.unlink()
    model_signing.signing.Config().use_certificate_signer(
        private_key=key, signing_certificate=own, certificate_chain=[issuer]
    ).sign(copy, place)
    check_trusted(copy, trust=root, required=True, expect=None)
    # A device verifies no certificates, so it trusts the key.
    check_trusted(copy, trust=key.with_suffix(".pub"), required=True, expect=None)
