"""Check that a bundle carries the decoder of its own head, with what that imports, and no other."""

from __future__ import annotations

import io
import zipfile

import pytest
from edgeq_device.answers.family import family_names

from edgeq.bundle.plan import build_runner


@pytest.mark.parametrize("family", family_names())
def test_a_bundle_has_the_code_of_its_head(family: str) -> None:
    content = build_runner({family})["edgeq_device.zip"]
    assert isinstance(content, bytes)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = set(archive.namelist())
        modules = [name for name in names if name.startswith("edgeq_device/answers/families/")]
        text = "\n".join(archive.read(name).decode() for name in modules)
    assert f"edgeq_device/answers/families/{family.replace('-', '_')}.py" in names
    for line in text.splitlines():
        if line.startswith("from edgeq_device.answers.families."):
            assert f"{line.split()[1].replace('.', '/')}.py" in names
    assert len(modules) <= 5


def test_a_bundle_without_a_head_has_no_decoder() -> None:
    content = build_runner(set())["edgeq_device.zip"]
    assert isinstance(content, bytes)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        families = [name for name in archive.namelist() if name.startswith("edgeq_device/answers/families/")]
    assert families == ["edgeq_device/answers/families/__init__.py"]
