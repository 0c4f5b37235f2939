"""Provide the bundles of tests/bundle here."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeq.bundle.transfer import push_bundle
from tests.bundle.conftest import copy, good, good_zip, spec

from .registry import in_process

__all__ = ["copy", "good", "good_zip", "spec"]


@pytest.fixture(scope="module")
def stored(good: Path) -> tuple[dict[str, bytes], str]:
    """Return the contents of a registry after a push, and the digest of the manifest."""
    with in_process() as registry:
        digest = push_bundle(good, f"{registry.host}/models/net").digest
        return registry.blobs, digest


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
