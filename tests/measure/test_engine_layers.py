"""Test that a plug-in's coverage is read from its layers in the profile, with the rules of its description."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq import demo
from edgeq.measure.coverage import Coverage, measure_coverage
from edgeq.measure.engine_layers import EngineLayer
from edgeq.measure.node_runs import classify_layers
from edgeq.model.prepare import prepare_model
from edgeq.run.engines import Engine, ExecutionGraph, load_engines
from edgeq.run.session import SessionSettings
from edgeq.util.records import parse, plain
from tests.backends.build import Bench, bench, residual
from tests.fake_engine import DESCRIPTION
from tests.plugins import needs_plugin

GRAPH = ExecutionGraph(
    options={"config": {"CPU": {"COUNT": "YES"}}},
    category="Kernel",
    operator="type",
    kernel="kernel",
    precisions={"i8": "int8", "bf16": "bf16"},
    conversions=("Reorder",),
    renamed="/inner$",
)


@pytest.fixture
def fake(tmp_path: Path) -> Engine:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "fake.toml").write_text(DESCRIPTION)
    return dataclasses.replace(load_engines(tmp_path / "engines")["fake"], graph=GRAPH)


@pytest.fixture
def net(tmp_path: Path) -> Bench:
    return bench(tmp_path, residual())


class Session:
    """Hold a made-up profile: the engine ran all layers but the last, which onnxruntime ran."""

    layers = (
        ("first/inner", "Convolution", "jit_amx_i8"),
        ("first/inner", "Convolution", "jit_amx_i8"),
        ("r1_reorder", "Reorder", "jit_i8"),
        ("depthwise", "Convolution", "jit_BF16"),
        ("c3", "Convolution", "gemm_i8"),
        ("shape", "ShapeOf", "ref_i64"),
        ("p", "Pooling", "ref_i64"),
    )

    def __init__(self, settings: SessionSettings) -> None:
        assert settings.profile_prefix is not None
        assert settings.engine is not None
        self.options, self._file = settings.engine.options, Path(f"{settings.profile_prefix}.json")

    def run(self, names: None, feed: Mapping[str, Any]) -> None:
        events: list[dict[str, Any]] = [
            {"cat": "Kernel", "name": name, "dur": 1, "args": {"type": kind, "kernel": kernel}}
            for name, kind, kernel in self.layers
        ]
        events.append({"cat": "Kernel", "name": "another provider's", "dur": 1, "args": {}})
        for name, op_type, provider in (("all of it", "Fused", "FakeExecutionProvider"), ("exp", "Exp", "CPU")):
            shapes = {"input_type_shape": [{"float": [1, 5]}], "output_type_shape": [{"float": [1, 5]}]}
            args = {"op_name": op_type, "provider": provider, **shapes}
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "dur": 1, "args": args})
        self._file.write_text(json.dumps(events))

    def end_profiling(self) -> str:
        return str(self._file)

    def close(self) -> None:
        pass


def measured(net: Bench, engine: Engine) -> tuple[Coverage, list[Session]]:
    sessions: list[Session] = []

    def opener(model: Path, settings: SessionSettings) -> Session:
        sessions.append(Session(settings))
        return sessions[0]

    feed = next(iter(net.samples)).inputs
    settings = SessionSettings(engine=engine, precision="bf16")
    coverage = measure_coverage(
        net.prepared.path, settings, feed, net.prepared.model, lambda *node: "because", how="a guest", opener=opener
    )
    return coverage, sessions


def test_layers_count_by_what_they_compute_in(net: Bench, fake: Engine) -> None:
    coverage, (session,) = measured(net, fake)
    assert session.options["config"]["CPU"] == {"HINT": "{precision}", "THREADS": "{threads}", "COUNT": "YES"}
    kinds = {run.name: (run.source, run.op_type, run.kind) for run in coverage.nodes}
    assert kinds == {
        "first": ("first", "Conv", "int8"),
        "r1_reorder": ("r1_reorder", "Reorder", "conversion"),
        "depthwise": ("depthwise", "Conv", "float"),
        "c3": ("last", "Conv", "int8"),
        "shape": ("shape", "ShapeOf", "conversion"),
        "p": ("pool", "GlobalAveragePool", "other"),
        "fc": ("fc", "Gemm", "float"),
        "exp": ("exp", "Exp", "float"),
    }
    assert coverage.precisions == {"int8": 2 * 8 * 64 * 72, "bf16": 8 * 64 * 9}
    assert coverage.int8_mac_share == pytest.approx(73728 / (73728 + 4608 + 40))
    assert coverage.summary() == "94.1% of the multiply-accumulates (5.9% bf16): measured on a guest"
    assert [(n.name, n.precision, n.reason) for n in coverage.float_nodes] == [
        ("depthwise", "bf16", "because"),
        ("fc", "", "because"),
        ("exp", "", "because"),
    ]
    record = plain(coverage)
    assert parse(record, Coverage, "a record").precisions == coverage.precisions


def test_an_engine_that_shows_nothing_is_not_guessed_at(net: Bench, fake: Engine) -> None:
    coverage, sessions = measured(net, dataclasses.replace(fake, graph=ExecutionGraph()))
    assert (coverage.basis, coverage.int8_mac_share, sessions) == ("unknown", None, [])
    assert coverage.summary() == "not known: fake does not show what it executes"


def test_a_layer_without_a_name_of_the_model_stands_for_what_was_merged_into_it(net: Bench) -> None:
    layers = [
        EngineLayer("Multiply_7", "Convolution", "jit_f32", "f32", ("norm", "relu")),
        EngineLayer("Multiply_8", "Convolution", "jit_bf16", "bf16", ("add",)),
        EngineLayer("Multiply_9", "Convolution", "jit_f32", "f32", ("unknown",)),
        EngineLayer("flatten", "Subgraph", "jit_f32", "f32", ("last", "pool", "flatten")),
        EngineLayer("y", "Reorder", "jit_f32", "f32", ("fc",)),
    ]
    macs = {"first": 10, "depthwise": 2, "last": 3, "fc": 5}
    runs = classify_layers(layers, ("Reorder",), net.prepared.model, macs, {})
    assert [(run.name, run.source, run.kind, run.macs) for run in runs] == [
        ("Multiply_7", "first", "float", 10),
        ("Multiply_8", "depthwise", "float", 2),
        ("Multiply_9", "Multiply_9", "conversion", 0),
        ("flatten", "last", "float", 3),
        ("y", "y", "conversion", 0),
        ("fc", "fc", "float", 5),
    ]


@needs_plugin("openvino")
def test_the_graph_of_an_installed_engine(tmp_path: Path) -> None:
    engine = load_engines()["openvino"]
    source = prepare_model(demo.MODEL, tmp_path).model
    with np.load(demo.CALIBRATION) as samples:
        feed = {"image": samples["image"][:1]}
    coverage = measure_coverage(demo.MODEL, SessionSettings(engine=engine), feed, source, lambda *node: "because")
    assert coverage.float_macs == sum(coverage.precisions.values()) == coverage.precisions["f32"] > 0
    assert coverage.origin == "measured on openvino, this machine"
