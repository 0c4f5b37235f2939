"""Provide one good bundle, as a directory and as a zip, which every test here may read or copy and damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle

from .samples import small_spec


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> BundleSpec:
    return small_spec(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def good(spec: BundleSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a good bundle directory. Tests must not change it."""
    place = tmp_path_factory.mktemp("bundle") / "linear"
    write_bundle(spec, place)
    return place


@pytest.fixture(scope="session")
def good_zip(spec: BundleSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a good .edgeq file. Tests must not change it."""
    place = tmp_path_factory.mktemp("bundle") / "linear.edgeq"
    write_bundle(spec, place)
    return place


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """Copy the good bundle directory, for the test to change."""
    return Path(shutil.copytree(good, tmp_path / "bundle"))
