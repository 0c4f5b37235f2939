"""Test which signatures are trusted: files and folders of keys, rotation, expiry, revocation."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import pytest
from edgeq_device.errors import BundleError, UsageError
from edgeq_device.trust import keys as trust_module
from edgeq_device.trust.keys import read_trust, trust_for
from edgeq_device.trust.signature import PublicKey, curves

KEY = PublicKey(curves()[0], curves()[0].x, curves()[0].y)


def pem(key: PublicKey, label: str = "PUBLIC KEY") -> str:
    return f"-----BEGIN {label}-----\n{base64.encodebytes(key.der).decode()}-----END {label}-----\n"


def write(place: Path, text: str | bytes) -> Path:
    place.write_bytes(text.encode() if isinstance(text, str) else text)
    return place


def test_pem_and_der_and_what_stands_around(tmp_path: Path) -> None:
    written = (
        "Public Key Information:\n\tCurve:\tSECP256R1\n\t\tX:\n\t\t\t00:b2\nPublic-Key: (256 bit)\nNIST CURVE: P-256\n"
    )
    text = f"{written}# build machine: EC\r\n\n{pem(KEY)}\n# another\nNot-After:  2031-02-03\n{pem(KEY)}\n"
    first, second = read_trust(write(tmp_path / "a", text)).keys
    assert (first.key, first.not_after) == (KEY, None)
    assert str(second.not_after) == "2031-02-03"
    assert [k.key for k in read_trust(write(tmp_path / "b", KEY.der)).keys] == [KEY]


def test_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "one.pub", pem(KEY))
    write(tmp_path / "two.der", KEY.der)
    write(tmp_path / ".keep", "")
    write(tmp_path / "revoked.txt", f"# lost\n\n{'a' * 64}  # laptop\n{KEY.id}\n")
    found = read_trust(tmp_path)
    assert [key.name for key in found.keys] == ["one.pub", "two.der"]
    assert found.revoked == {"a" * 64, KEY.id}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.pub", "nothing", "not an elliptic-curve public key"),
        ("x.pub", pem(KEY).replace("-----END", "----END"), "is cut off"),
        ("x.pub", pem(KEY) + "-----BEGIN PUBLIC KEY-----\n", "is cut off"),
        ("x.pub", pem(KEY).replace("M", "-", 1), "not base64"),
        ("x.pem", pem(KEY, "EC PRIVATE KEY"), "contains a EC PRIVATE KEY"),
        ("x.pub", pem(KEY).replace("==", "="), "not base64"),
        ("x.pub", pem(KEY).replace("-----END", "Comment: x\n-----END"), "not base64"),
        ("x.crt", f"not-after: 2031-01-01\n{pem(KEY, 'CERTIFICATE')}", "has its own last day"),
        ("x.pub", "x" * (1 << 20) + "x", "larger than"),
        ("revoked.text", "a" * 64, "has none of the suffixes"),
        ("revoked.txt", "a" * 63, "is not the id of a key"),
        ("revoked.txt", b"\xff", "neither DER nor text"),
        ("revoked.txt", f"# lost\r{'a' * 64}", "revoked.txt:1: .* control character"),
        ("revoked.txt", "", "contains no key"),
    ],
)
def test_refuses_key_files_that_it_does_not_understand(
    name: str, text: str | bytes, problem: str, tmp_path: Path
) -> None:
    """A file that edgeq does not understand is refused. If it skipped a revocation, it would trust the revoked key."""
    write(tmp_path / name, text)
    with pytest.raises(UsageError, match=problem):
        read_trust(tmp_path)


DAY = "2020-01-01"


@pytest.mark.parametrize(
    "line",
    [
        *(f"not-after{sign}{DAY}" for sign in (" ", "=", " = ", "#", " # ", ":=", " : ", "", "\t")),
        *(f"{start}{DAY}" for start in ("# not-after: ", "#not after ", "# Not_After=", "notAfter=", "not after: ")),
        *(f"{start}{DAY}" for start in ("expires: ", "not-before: ", "-not-after: ", "\ufeffnot-after: ", "key ")),
        *(f"not-after: {day}" for day in ("tomorrow", "1", "", "20200101", "2020-W01-1", "2020-02-30", "2020-1-1")),
        *(f"not-after: {day}" for day in (f"{DAY}T00:00", f"{DAY} # remark", f'"{DAY}"', f"{DAY}\u2028")),
        f"not-after: {DAY}\nnot-after: {DAY}",
        f"not-after: {DAY}\nremark",
        f"# remark\vnot-after: {DAY}",
        f"# remark\rnot-after: {DAY}",
    ],
)
def test_a_last_day_counts_or_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pub"
    for text in (f"# a\n{line}\n{pem(KEY)}", f"# a\r\n{line}\r\n{pem(KEY)}"):
        with pytest.raises(UsageError, match=r"x\.pub:[23]: "):
            read_trust(write(file, text))
    assert str(read_trust(write(file, f"  not-after: {DAY}\t\n{pem(KEY)}")).keys[0].not_after) == DAY


def test_a_last_day_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no key follows"):
        read_trust(write(tmp_path / "x.pub", f"{pem(KEY)}not-after: {DAY}\n"))


def test_the_place_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEQ_TRUST", raising=False)
    place = tmp_path / "trust"
    monkeypatch.setattr(trust_module, "PLACE", str(place))
    assert trust_for(None, required=False) is None
    with pytest.raises(UsageError, match="no key is trusted here"):
        trust_for(None, required=True)
    place.mkdir()
    with pytest.raises(UsageError, match="contains no key"):
        trust_for(None, required=False)
    write(place / "a.pub", pem(KEY))
    found = trust_for(None, required=False)
    assert found is not None
    assert found.source == str(place)
    monkeypatch.setenv("EDGEQ_TRUST", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="cannot be read"):
        trust_for(None, required=False)
    given = trust_for(place / "a.pub", required=True)
    assert given is not None
    # A file is in the place of its folder. A folder that cannot be read does not count as missing.
    monkeypatch.delenv("EDGEQ_TRUST")
    monkeypatch.setattr(trust_module, "PLACE", str(place / "a.pub" / "trust"))
    with pytest.raises(UsageError, match="cannot be read"):
        trust_for(None, required=False)


def test_rotation_expiry_and_revocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keys are trusted while one replaces the other. Then the old key expires or is revoked."""
    pytest.importorskip("cryptography")
    from edgeq.bundle.write import read_signing_key, sign_files
    from tests.bundle.signing.keys import write_key

    files = {"a": "0" * 64}
    old, new = (read_signing_key(write_key(tmp_path, name)) for name in ("old", "new"))
    by_old, by_new = sign_files(files, "m", old), sign_files(files, "m", new)
    folder = tmp_path / "trust"
    folder.mkdir()

    def who(data: bytes) -> str:
        return trust_module.verify_signature(data, files, read_trust(folder), "m").name

    shutil.copy(tmp_path / "old.pub", folder)
    assert who(by_old) == "old.pub"
    with pytest.raises(BundleError, match=new.public.id):
        who(by_new)
    shutil.copy(tmp_path / "new.pub", folder)
    assert (who(by_old), who(by_new)) == ("old.pub", "new.pub")

    text = (tmp_path / "old.pub").read_text()
    write(folder / "old.pub", f"not-after: 2999-12-31\n{text}")
    assert who(by_old) == "old.pub"
    write(folder / "old.pub", f"not-after: 2020-01-01\n{text}")
    with pytest.raises(BundleError, match="trusted until 2020-01-01"):
        who(by_old)

    write(folder / "old.pub", text)
    write(folder / "revoked.txt", f"{old.public.id}\n")
    with pytest.raises(BundleError, match="was revoked"):
        who(by_old)
    assert who(by_new) == "new.pub"
    other = {"a": "1" * 64}
    with pytest.raises(BundleError, match="was changed, according to its signature"):
        trust_module.verify_signature(by_new, other, read_trust(folder), "m")
