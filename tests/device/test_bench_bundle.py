from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from edgeq_device.bundle.bench_models import build_bench_models, choose_variants, find_feeds
from edgeq_device.bundle.package import open_bundle
from edgeq_device.engines.device import read_device
from edgeq_device.engines.serve import parse_variant

from edgeq.bundle.spec import BundleSpec, SelfTestCase, SelfTestSpec, VariantSpec
from edgeq.bundle.write import write_bundle

from . import fakes


def bundle(models: dict[str, Path], destination: Path, *, with_float: bool = True, with_selftest: bool = True) -> Path:
    x = {"x": np.linspace(0, 1, 64, dtype=np.float32)[None]}
    session = onnxruntime.InferenceSession(str(models["narrow"]), providers=["CPUExecutionProvider"])
    case = SelfTestCase(x, {"y": session.run(None, x)[0]})
    selftest = SelfTestSpec((case,), {"y": 1e-3}) if with_selftest else SelfTestSpec()
    variant = VariantSpec("small", models["narrow"], selftest=selftest)
    write_bundle(BundleSpec("b", (variant,), float_model=models["wide"] if with_float else None), destination)
    return destination


def test_float32_comes_first_and_self_test_inputs_are_the_samples(models: dict[str, Path], tmp_path: Path) -> None:
    with open_bundle(bundle(models, tmp_path / "b")) as opened:
        variants, _ = choose_variants(opened, read_device())
        models = build_bench_models(variants)
        assert [s.name for s in models] == ["float32", "small"]
        feeds = find_feeds(variants)
        assert feeds is not None
        (feed,) = feeds(None)
        assert feed["x"].shape == (1, 64)
        session = models[1].open(1)
        assert session.run(None, dict(feed))[0].shape == (1, 8)
        assert models[1].memory is not None


def test_a_bundle_without_float32_or_self_test(models: dict[str, Path], tmp_path: Path) -> None:
    path = bundle(models, tmp_path / "b", with_float=False, with_selftest=False)
    with open_bundle(path) as opened:
        variants, _ = choose_variants(opened, read_device())
        assert [s.name for s in build_bench_models(variants)] == ["small"]
        assert find_feeds(variants) is None


def test_memory_is_measured_with_the_engines_of_the_bundle(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement of memory uses the bundle's folder of engines. Without it, TensorRT's provider would store
    engines and timings in the current directory.
    """
    seen: dict[str, Any] = {}
    monkeypatch.setattr("edgeq_device.bundle.bench_models.measure_memory", lambda request, shapes: seen.update(request))
    one = fakes.variant(
        ep="TensorrtExecutionProvider",
        model=models["narrow"],
        provider_options={"trt_engine_cache_enable": "1"},
        bundle="ab12",
    )
    (model,) = build_bench_models([one])
    assert model.memory is not None
    model.memory(1, {})
    again = parse_variant(seen)
    assert (again.bundle, again.provider_options) == ("ab12", {"trt_engine_cache_enable": "1"})


def run_on_device(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(root / "edgeq_run.py"), "bench", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=root.parent,
        check=False,
    )


def test_the_runner_inside_a_bundle_measures_it(models: dict[str, Path], tmp_path: Path) -> None:
    root = bundle(models, tmp_path / "b")
    done = run_on_device(root, "--duration", "0.05", "--queries", "20", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert list(report["models"]) == ["float32", "small"]
    assert "small" in report["scenarios"]["single-stream"]["ratios"]
    for model in report["models"].values():
        if sys.platform == "linux":
            assert model["memory"]["process_peak_bytes"] > 0
    text = run_on_device(root, "--duration", "0.05", "--queries", "20", "-v")
    assert text.returncode == 0, text.stderr
    assert "single-stream: 1 sample a query; p90 counts" in text.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "sideways"], "no scenario 'sideways'"),
        (["--pin", "a"], "does not name cores"),
        (["--duration", "nan"], "duration of nan"),
        (["--shape", "z=1"], "no input 'z'"),
        (["--shape", "x"], "is not a shape"),
    ],
)
def test_bad_arguments_are_one_line(
    models: dict[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run_on_device(bundle(models, tmp_path / "b", with_selftest=False), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
