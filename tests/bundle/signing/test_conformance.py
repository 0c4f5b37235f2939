"""Run the key and certificate cases of OpenSSF Model Signing's conformance suite, which is next to the checkout."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.errors import DeviceError
from edgeq_device.trust.keys import read_trust, verify_signature
from edgeq_device.trust.signature import parse_signature, read_signed_files

from edgeq.bundle.verify import verify_chain
from edgeq.errors import EdgeqError
from tests.conftest import find_shared_data

FOLDER = (find_shared_data() or Path()) / "oms-conformance"
GIT = (".git", ".gitignore", ".gitattributes", ".github")


def cases() -> list[str]:
    found = sorted(FOLDER.glob("test-cases/verify/*/*/config.json"))
    return [p.parent.name for p in found if json.loads(p.read_bytes())["method"] != "sigstore"]


def test_all_cases_are_here(shared_data: Path) -> None:
    del shared_data
    assert len(cases()) == 36


@pytest.mark.parametrize("name", cases())
def test_verdict(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    case = next(FOLDER.glob(f"test-cases/verify/*/{name}"))
    config = json.loads((case / "config.json").read_bytes())
    base = case if config.get("model_relative_to") == "test_dir" else FOLDER / "assets"
    refused = pytest.raises((DeviceError, EdgeqError)) if config.get("expect") == "fail" else nullcontext()
    model = modified(base / config["model"], config, tmp_path)
    with refused:
        verify(case / "bundle.sig", model, config)


def modified(model: Path, config: dict[str, Any], folder: Path) -> Path:
    """Return a copy of the model with the case's changes, or the model itself if the case has none."""
    changes = config.get("model_modifications", {})
    if not changes:
        return model
    copy = Path(shutil.copytree(model, folder / "model"))
    copy.chmod(0o755)
    for name in changes.get("delete", ()):
        (copy / name).unlink()
    for name, text in {**changes.get("inject", {}), **changes.get("tamper", {})}.items():
        (copy / name).unlink(missing_ok=True)
        (copy / name).write_text(text)
    return copy


def verify(signature: Path, model: Path, config: dict[str, Any]) -> None:
    wanted = config["verify"]
    trust = wanted.get("public_key") or wanted["cert_chain"][0]
    # The suite's snapshot lacks this key. Another one can replace it, because no known key made the signature.
    trust = trust.replace("keys/ec-p256/", "keys/self-signed/")
    data = signature.read_bytes()
    ignored = (*GIT, *wanted.get("ignore_paths", ()))
    if model.is_file():
        files = {"." if config.get("expected_signed_files") == ["."] else model.name: model}
    else:
        names = {p.relative_to(model).as_posix(): p for p in model.rglob("*") if p.is_file()}
        files = {name: p for name, p in names.items() if not name.startswith(ignored)}
    found = {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in files.items()}
    if wanted.get("ignore_unsigned_files"):
        signed = read_signed_files(parse_signature(data, "").payload, "")
        found = {name: digest for name, digest in found.items() if name in signed}
    keyed = "cert_chain" in wanted
    verify_signature(data, found, read_trust(FOLDER / "assets" / trust), model.name, verify_chain if keyed else None)
