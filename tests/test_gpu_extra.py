"""Test that the extra `gpu` matches the libraries that the installed onnxruntime-gpu wheel links against."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# A library of the execution provider → the distribution that the extra names for it.
LIBRARIES = {"nvinfer": "tensorrt"}


def extra() -> dict[str, Requirement]:
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    requirements = map(Requirement, project["optional-dependencies"]["gpu"])
    return {requirement.name: requirement for requirement in requirements}


def needed(library: Path) -> list[str]:
    """Return the DT_NEEDED entries of a shared library."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    with library.open("rb") as stream:
        section = elffile.ELFFile(stream).get_section_by_name(".dynamic")
        return [tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def test_the_extra_keeps_to_one_major_version_of_tensorrt() -> None:
    specifier = extra()["tensorrt"].specifier
    assert specifier.contains("10.16.1")
    assert not specifier.contains("11.0")
    assert extra()["onnxruntime-gpu"].extras == {"cuda", "cudnn"}


def test_the_extra_has_the_libraries_of_the_wheel() -> None:
    try:
        wheel = importlib.metadata.distribution("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("onnxruntime-gpu is not installed: what its libraries need cannot be read")
    files = {path.name: Path(str(wheel.locate_file(path))) for path in wheel.files or ()}
    if "libonnxruntime_providers_tensorrt.so" not in files:
        pytest.skip("this wheel of onnxruntime-gpu has no TensorRT provider in an ELF file")
    linked = needed(files["libonnxruntime_providers_tensorrt.so"])
    for library, distribution in LIBRARIES.items():
        (major,) = {match[1] for name in linked if (match := re.fullmatch(rf"lib{library}\.so\.(\d+)", name))}
        specifier = extra()[distribution].specifier
        assert specifier.contains(f"{major}.999")
        assert not specifier.contains(f"{int(major) + 1}.0")
        assert not specifier.contains(f"{int(major) - 1}.999")
    # CUDA and cuDNN come from the wheel's own extras, which name packages for the versions that it links against.
    offered = set(wheel.metadata.get_all("Provides-Extra") or ())
    assert extra()["onnxruntime-gpu"].extras <= offered
    cuda = {match[1] for name in linked if (match := re.fullmatch(r"libcudart\.so\.(\d+)", name))}
    cudnn = {match[1] for name in linked if (match := re.fullmatch(r"libcudnn\.so\.(\d+)", name))}
    required = " ".join(wheel.requires or ())
    assert all(re.search(rf"nvidia-cuda-runtime\S*~={major}\.", required) for major in cuda)
    assert all(re.search(rf"nvidia-cudnn-cu\d+~={major}\.", required) for major in cudnn)
