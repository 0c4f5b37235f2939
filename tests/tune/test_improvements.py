"""`edgeq.prove.checks` with those of `edgeq.tune.improvements`: what helps is found on the very model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import edgeq
from edgeq.jobs.quantize import Quantized
from edgeq.model.edit import to_bytes
from edgeq.prove import checks
from edgeq.util.records import plain
from tests.tune.recover.nets import Net, few
from tests.tune.recover.transformer import SHAPE, transformer

pytestmark = pytest.mark.usefixtures("exact_kernels")

STAGE = "Trying what would help"
WIDEST = 300.0


def _written(model: ir.Model, folder: Path, shape: tuple[int, ...], widest: float) -> None:
    """Write the model and samples, of which the last is `widest` times as wide as the first: what has one scale for all
    of them loses the first, what measures ranges at run time loses none."""
    (folder / "m.onnx").write_bytes(to_bytes(model))
    scales = np.geomspace(1, widest, 8, dtype=np.float32)
    np.savez(folder / "x.npz", x=np.stack([s.inputs["x"] * k for s, k in zip(few(8, shape), scales, strict=True)]))


def _quantized(model: ir.Model, folder: Path, shape: tuple[int, ...], widest: float = 1, **options: Any) -> Quantized:
    _written(model, folder, shape, widest)
    options = {"target": "cpu-any", "timed": False, "emulate": False, **options}
    return edgeq.quantize(folder / "m.onnx", edgeq.Data(folder / "x.npz"), folder / "q.onnx", force=True, **options)


def test_a_transformer_hears_of_run_time_ranges_with_the_figure_that_they_give(tmp_path: Path) -> None:
    poor = _quantized(transformer(), tmp_path, SHAPE, WIDEST)
    assert poor.proof.agreement.sqnr_db < 15
    best = poor.proof.improvements[0]
    assert best.option == "--dynamic"
    assert best.plain_db == pytest.approx(poor.proof.agreement.sqnr_db, abs=0.5)
    (warning,) = [text for text in poor.proof.warnings() if "dB SQNR" in text]
    assert f"`--dynamic` gave {best.sqnr_db:.1f} dB on 8 samples" in warning
    assert plain(poor)["improvements"][0]["option"] == "--dynamic"
    dynamic = _quantized(transformer(), tmp_path, SHAPE, WIDEST, overrides={"mode": "dynamic"})
    assert best.sqnr_db == pytest.approx(dynamic.proof.agreement.sqnr_db, abs=0.5)
    assert dynamic.proof.agreement.sqnr_db >= 20
    assert dynamic.proof.improvements == ()
    assert STAGE not in dynamic.seconds, "a good model pays nothing"
    assert STAGE in poor.seconds


def test_a_bundle_says_it_too(tmp_path: Path) -> None:
    _written(transformer(layers=1), tmp_path, SHAPE, WIDEST)
    made = edgeq.package(
        tmp_path / "m.onnx",
        edgeq.Data(tmp_path / "x.npz"),
        tmp_path / "dist",
        targets=("cpu-any",),
        timed=False,
        emulate=False,
    )
    (variant,) = made.variants.values()
    assert variant.proof.improvements[0].option == "--dynamic"
    assert any("`--dynamic` gave" in warning for warning in variant.proof.warnings())


def test_a_target_without_such_a_mode_hears_which_layers(tmp_path: Path) -> None:
    poor = _quantized(transformer(layers=1), tmp_path, SHAPE, target="gemmini")
    options = [tried.option for tried in poor.proof.improvements]
    assert "--dynamic" not in options
    best = poor.proof.improvements[0]
    assert best.option.startswith("--min-sqnr ")
    assert best.nodes
    assert best.sqnr_db is not None
    again = _quantized(transformer(layers=1), tmp_path, SHAPE, target="gemmini", overrides={"exclude": best.nodes})
    assert again.proof.agreement.sqnr_db == pytest.approx(best.sqnr_db, abs=0.5)


def test_convolutions_hear_of_no_mode_that_leaves_them_in_float(tmp_path: Path) -> None:
    """Channels of very different size are what equalization is for; its option gives what the warning says."""
    net, channels = Net(), np.where(np.arange(8) == 3, 300.0, 1.0)
    x = net.node("Relu", [net.conv("x", "first", 3, 8, channels=channels)], "act")
    weight = net.random.normal(0, 0.3, (8, 8, 1, 1)) / channels[:, None, None]
    x = net.node("Conv", [x, net.constant("w2", weight)], "second")
    net.conv(x, "last", 8, 8)
    model, shape = net.model({"x": (1, 3, 12, 12)}, ["last_out"]), (1, 3, 12, 12)
    poor = _quantized(model, tmp_path, shape)
    assert poor.proof.agreement.sqnr_db < 20
    best = poor.proof.improvements[0]
    assert "--dynamic" not in [tried.option for tried in poor.proof.improvements]
    assert best.option.startswith("--recover ")
    again = _quantized(model, tmp_path, shape, builder=edgeq.recovering(best.option.removeprefix("--recover ")))
    assert again.proof.agreement.sqnr_db == pytest.approx(best.sqnr_db, abs=0.5)


def test_what_is_too_costly_is_named_without_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_WORK", 0)
    poor = _quantized(transformer(layers=1), tmp_path, SHAPE, WIDEST)
    assert poor.proof.improvements
    assert all(tried.sqnr_db is None for tried in poor.proof.improvements)
    assert "`--dynamic` may help, and was too costly to try" in " ".join(poor.proof.warnings())


def test_the_best_comes_first_and_nothing_that_does_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "GOOD_DB", math.inf)  # nothing is good enough to stop
    poor = _quantized(transformer(layers=1), tmp_path, SHAPE, WIDEST)
    found = [tried.sqnr_db or 0.0 for tried in poor.proof.improvements]
    assert len(found) > 1
    assert found == sorted(found, reverse=True)
    assert all(db > poor.proof.agreement.sqnr_db for db in found)
