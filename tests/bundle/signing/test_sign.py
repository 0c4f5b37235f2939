"""Test `edgeq sign` and the programs that verify its signatures: `edgeq verify --trust` and the runner."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from edgeq_device.bundle.package import open_bundle
from edgeq_device.cli import main

from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.verify import check_trusted
from edgeq.bundle.write import sign_bundle, write_bundle
from edgeq.cli import group
from edgeq.errors import BundleError, DataError, OutputError, UsageError
from tests.bundle.samples import tree

from .keys import CURVES, write_chain, write_key


def verified(bundle: Path, trust: Path) -> None:
    check_trusted(bundle, trust=trust, required=True, expect=None)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "keys")


def test_verifying_elsewhere_opens_what_was_signed(
    copy: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify --on` opens the bundle whose signature it checked, even if the bundle is replaced after the check."""
    sign_bundle(copy, key=key)

    def swapped(path: Path, **how: Any) -> str | None:
        found = check_trusted(path, **how)
        manifest = copy / "manifest.json"
        manifest.write_bytes(manifest.read_bytes() + b"\n")
        return found

    monkeypatch.setattr("edgeq.bundle.verify.check_trusted", swapped)
    where = ["--on", "all", "--trust", str(key.with_suffix(".pub"))]
    done = CliRunner().invoke(group, ["verify", str(copy), *where])
    assert done.exit_code == 7
    assert "is another bundle" in done.stderr


def test_command(copy: Path, key: Path) -> None:
    public = str(key.with_suffix(".pub"))
    unsigned = CliRunner().invoke(group, ["verify", str(copy), "--trust", public])
    assert unsigned.exit_code == 7
    assert "is not signed" in unsigned.stderr

    done = CliRunner().invoke(group, ["sign", str(copy), "--key", str(key), "--json"])
    assert done.exit_code == 0, done.output
    signed = json.loads(done.stdout)
    assert signed["files"] == len(tree(copy)) - 1
    again = CliRunner().invoke(group, ["sign", str(copy), "--key", str(key)])
    assert again.exit_code == 6
    assert "already signed" in again.stderr

    done = CliRunner().invoke(group, ["verify", str(copy), "--trust", public, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["signed"] is True
    assert found["signer"] == {"key": signed["key"], "trusted_by": "key.pub"}
    assert found["extra_files"] == []
    unchecked = CliRunner().invoke(group, ["verify", str(copy)])
    assert unchecked.exit_code == 0
    assert "signed, but not checked" in unchecked.stdout
    nobody = CliRunner().invoke(group, ["verify", str(copy), "--require-signature"])
    assert nobody.exit_code == 2
    assert "no key is trusted here" in nobody.stderr


def test_the_runner(copy: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public, other = str(key.with_suffix(".pub")), str(write_key(tmp_path, "other").with_suffix(".pub"))
    sign_bundle(copy, key)
    assert main(["verify", "--trust", public], root=copy) == 0
    assert "signed by key.pub" in capsys.readouterr().out
    for command in ("info", "verify", "bench"):
        assert main([command, "--trust", other], root=copy) == 7
        assert "not signed by a key of" in capsys.readouterr().err
    assert main(["info", "--require-signature"], root=copy) == 2


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "out.npz", "README"])
def test_a_file_that_nobody_signed(name: str, copy: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unsigned file in a signed bundle is refused. Nothing reads it, but people would take it for signed."""
    public = str(key.with_suffix(".pub"))
    sign_bundle(copy, key)
    (copy / name).write_text("run this first")
    assert CliRunner().invoke(group, ["verify", str(copy)]).exit_code == 0
    refused = CliRunner().invoke(group, ["verify", str(copy), "--trust", public])
    assert refused.exit_code == 7
    assert f"{name!r} is not signed" in refused.stderr
    for command in ("info", "verify", "bench"):
        assert main([command, "--trust", public], root=copy) == 7
        assert f"{name!r} is not signed" in capsys.readouterr().err
    (copy / name).unlink()
    assert CliRunner().invoke(group, ["verify", str(copy), "--trust", public]).exit_code == 0


@pytest.mark.parametrize("curve", CURVES)
def test_every_curve_as_directory_and_zip(curve: str, copy: Path, good_zip: Path, tmp_path: Path) -> None:
    key = write_key(tmp_path, "key", curve)
    zipped = Path(shutil.copy(good_zip, tmp_path / "x.edgeq"))
    for bundle in (copy, zipped):
        sign_bundle(bundle, key)
        verified(bundle, key.with_suffix(".pub"))
    with open_bundle(copy) as one, open_bundle(zipped) as other:
        assert one.signature == other.signature
    before = zipped.read_bytes()
    sign_bundle(zipped, key, force=True)
    assert zipped.read_bytes() == before


def flip(bundle: Path) -> None:
    place = bundle / "model.sig"
    data = json.loads(place.read_bytes())
    value = data["dsseEnvelope"]["payload"]
    data["dsseEnvelope"]["payload"] = value[:400] + ("A" if value[400] != "A" else "B") + value[401:]
    place.write_text(json.dumps(data))


def other_files(bundle: Path) -> None:
    """Change the bundle so that its manifest matches its files but is not the one that was signed."""
    manifest = bundle / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"package_name": "linear"', b'"package_name": "planar"'))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (flip, "not signed by a key of"),
        (other_files, "'manifest.json' was changed, according to its signature"),
        (lambda bundle: (bundle / "model.sig").unlink(), "is not signed"),
        (lambda bundle: (bundle / "model.sig").write_bytes(b"{}"), "not a Sigstore bundle"),
        (lambda bundle: (bundle / "model.sig").write_bytes(b""), "not valid JSON"),
    ],
)
def test_refuses_changed_bundles(change: Callable[[Path], None], problem: str, copy: Path, key: Path) -> None:
    sign_bundle(copy, key)
    change(copy)
    with pytest.raises(BundleError, match=problem):
        verified(copy, key.with_suffix(".pub"))


def test_a_signature_of_another_bundle_is_refused(spec: BundleSpec, copy: Path, key: Path, tmp_path: Path) -> None:
    import dataclasses

    write_bundle(dataclasses.replace(spec, name="another"), tmp_path / "another")
    sign_bundle(tmp_path / "another", key)
    shutil.copy(tmp_path / "another" / "model.sig", copy)
    with pytest.raises(BundleError, match="was changed, according to its signature"):
        verified(copy, key.with_suffix(".pub"))


def test_a_signed_bundle_is_written_anew(spec: BundleSpec, copy: Path, key: Path) -> None:
    sign_bundle(copy, key)
    write_bundle(spec, copy, force=True)
    assert not (copy / "model.sig").exists()
    (copy / "model.sig").write_text("a letter")
    with pytest.raises(OutputError, match=r"model\.sig, which edgeq did not write"):
        write_bundle(spec, copy, force=True)
    with pytest.raises(OutputError, match="not a signature"):
        sign_bundle(copy, key, force=True)


def test_a_manifest_cannot_list_the_signature(copy: Path, key: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_bytes())
    manifest["additional_metadata"]["edgeq"]["files"]["Model.sig"] = {"sha256": "0" * 64, "size": 1}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="occurs twice"):
        sign_bundle(copy, key)


def test_keys_that_cannot_sign(copy: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        sign_bundle(copy, tmp_path / "absent.pem")
    with pytest.raises(DataError, match="not a private key"):
        sign_bundle(copy, key.with_suffix(".pub"))
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    (tmp_path / "ed.pem").write_bytes(
        Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    with pytest.raises(DataError, match="not an elliptic-curve key"):
        sign_bundle(copy, tmp_path / "ed.pem")
    locked = write_key(tmp_path, "locked", password=b"open sesame")
    with pytest.raises(UsageError, match="is encrypted"):
        sign_bundle(copy, locked)
    monkeypatch.setenv("EDGEQ_KEY_PASSWORD", "wrong")
    with pytest.raises(DataError, match="the password"):
        sign_bundle(copy, locked)
    monkeypatch.setenv("EDGEQ_KEY_PASSWORD", "open sesame")
    sign_bundle(copy, locked)
    verified(copy, locked.with_suffix(".pub"))


def test_certificates(copy: Path, tmp_path: Path) -> None:
    key, own, issuer, root = write_chain(tmp_path / "ca")
    _, _, _, other_root = write_chain(tmp_path / "other")
    sign_bundle(copy, key, certificates=[own, issuer])
    verified(copy, root)
    verified(copy, issuer)
    verified(copy, key.with_suffix(".pub"))
    with pytest.raises(BundleError, match="is not trusted"):
        verified(copy, other_root)
    # The runner on a device cannot verify certificates, so it takes the key.
    assert main(["verify", "--trust", str(root)], root=copy) == 7
    assert main(["verify", "--trust", str(key.with_suffix(".pub"))], root=copy) == 0
    with pytest.raises(UsageError, match="is not the certificate of"):
        sign_bundle(copy, write_key(tmp_path, "x"), certificates=[own], force=True)


@pytest.mark.parametrize("leaf", [{"days": -1}, {"signs": False}], ids=["expired", "not for signing"])
def test_certificates_that_do_not_hold(leaf: dict[str, int], copy: Path, tmp_path: Path) -> None:
    key, own, issuer, root = write_chain(tmp_path, **leaf)
    with pytest.raises(UsageError, match=r"signer\.crt"):
        sign_bundle(copy, key, certificates=[own, issuer])
    from edgeq.bundle import write as sign

    signing = sign.read_signing_key(key)
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    chain = [x509.load_pem_x509_certificate(p.read_bytes()).public_bytes(Encoding.DER) for p in (own, issuer)]
    with open_bundle(copy) as bundle:
        files = {name: record.sha256 for name, record in bundle.files.items()}
        files["manifest.json"] = bundle.manifest_sha256
    (copy / "model.sig").write_bytes(
        sign.sign_files(files, "x", sign.SigningKey(signing.private, signing.public, tuple(chain)))
    )
    with pytest.raises(BundleError, match=r"not trusted|may not sign"):
        verified(copy, root)
