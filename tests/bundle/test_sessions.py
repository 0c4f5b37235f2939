"""Test sessions with the options in a bundle, and shared weights on runtimes that do not know the option for their
folder.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.bundle.package import Bundle, open_bundle
from edgeq_device.bundle.variants import Variant
from edgeq_device.engines.sessions import open_session
from edgeq_device.errors import BundleError, RuntimeUnavailableError

from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.write import write_bundle

from .samples import INPUT, answer, linear, variant


def opened_pair(folder: Path) -> Bundle:
    """Open a bundle of two variants that share a file of weights in a folder of its own."""
    models = [linear(folder / str(i) / "m.onnx", float(i), external="weights.bin") for i in (0, 1)]
    write_bundle(BundleSpec("x", tuple(variant(f"v{i}", m, float(i)) for i, m in enumerate(models))), folder / "b")
    return open_bundle(folder / "b")


def check(variants: tuple[Variant, ...]) -> None:
    for bias, one in enumerate(variants):
        (found,) = open_session(one).run(None, {"x": INPUT})
        np.testing.assert_allclose(found, answer(float(bias)), atol=1e-4)


@pytest.mark.parametrize("runtime", ["1.18.1", "1.21.0", onnxruntime.__version__])
def test_shared_weights_are_found(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The version decides the method. Every method works on this runtime, except that it refuses symbolic links.
    monkeypatch.setattr(onnxruntime, "__version__", runtime)
    monkeypatch.setattr(Path, "symlink_to", lambda link, file: os.link(file, link))
    with opened_pair(tmp_path / "pair") as bundle:
        check(bundle.components["model"])


def test_shared_weights_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise OSError("no links on this file system")

    monkeypatch.setattr(onnxruntime, "__version__", "1.18.1")
    monkeypatch.setattr(Path, "symlink_to", refused)
    with opened_pair(tmp_path / "pair") as bundle:
        check(bundle.components["model"])


def test_the_options_arrive(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def session(source: object, options: Any, providers: list[Any]) -> object:
        seen.update(options=options, providers=providers, source=source)
        return object()

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    with open_bundle(good) as bundle:
        plain = bundle.components["model"][0]
    plain = dataclasses.replace(
        plain,
        ep="XnnpackExecutionProvider",
        provider_options={"intra_op_num_threads": "2"},
        info={"optimization": "basic"},
    )
    open_session(plain, threads=3)
    assert seen["options"].get_session_config_entry("session.x64quantprecision") == "1"
    assert seen["options"].intra_op_num_threads == 3
    assert seen["options"].graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert seen["providers"] == [("XnnpackExecutionProvider", {"intra_op_num_threads": "2"}), "CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"session_options": {"session.node_partition_config_file": "x"}}, "session option 'session.node_partition"),
        ({"provider_options": {"use_arena": "1"}}, "provider option 'use_arena' is not one"),
        ({"ep": "QNNExecutionProvider", "provider_options": {"op_packages": "x"}}, "provider option 'op_packages'"),
    ],
)
def test_no_session_is_opened_with_other_options(good: Path, changes: dict[str, Any], says: str) -> None:
    """A session refuses options without a row in the table, whoever made the variant. In an emulated machine, the
    variant comes from a request to the program instead of the bundle's reader.
    """
    with open_bundle(good) as bundle:
        plain = bundle.components["model"][0]
    with pytest.raises(BundleError, match=says):
        open_session(dataclasses.replace(plain, **changes))


def test_refusals_of_the_runtime_are_one_line(good: Path, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"no model")
    with open_bundle(good) as bundle:
        plain = bundle.components["model"][0]
    with pytest.raises(RuntimeUnavailableError, match="refuses variant plain") as refusal:
        open_session(dataclasses.replace(plain, model=tmp_path / "x.onnx"))
    assert "\n" not in str(refusal.value)
    with pytest.raises(BundleError, match="optimization is 'turbo'"):
        open_session(dataclasses.replace(plain, info={"optimization": "turbo"}))
    with pytest.raises(BundleError, match="ONNX Runtime does not run"):
        open_session(dataclasses.replace(plain, model=None))
