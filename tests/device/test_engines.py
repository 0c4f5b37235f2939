from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.engines.catalog import EngineSpec, Precision, engine_options, engines, read_engine
from edgeq_device.engines.sessions import open_session
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import BundleError, UsageError

SPEC = EngineSpec(
    "fake",
    "FakeExecutionProvider",
    precisions={"f32": Precision("single")},
    options={"streams": "1", "config": {"CPU": {"HINT": "{precision}", "THREADS": "{threads}"}}},
)


def test_options_are_filled_in() -> None:
    assert engine_options(SPEC, threads=2) == {"config": '{"CPU":{"HINT":"single","THREADS":"2"}}', "streams": "1"}
    assert engine_options(SPEC) == {"config": '{"CPU":{"HINT":"single"}}', "streams": "1"}
    assert engine_options(replace(SPEC, options={"threads": "{threads}"})) == {}


def test_a_precision_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fake has no precision 'bf16'. Choose from f32"):
        engine_options(SPEC, "bf16")


def test_a_description_survives_the_way_to_another_process() -> None:
    for engine in (SPEC, *engines().values()):
        assert read_engine(engine.to_dict()) == engine


@pytest.mark.parametrize("precision", ["f64", 32, ["f32"]])
def test_a_bundle_cannot_choose_what_the_engine_does_not_have(precision: object) -> None:
    variant = Variant(
        name="v",
        component="model",
        ep=engines()["openvino"].provider,
        model=Path("model.onnx"),
        session_options={},
        provider_options={},
        architecture="any",
        required_features=(),
        rank=0,
        min_onnxruntime="",
        cases=(),
        tolerance={},
        info={"precision": precision},
    )
    with pytest.raises(BundleError, match=r"precision is .*; it can be f32, bf16, f16"):
        open_session(variant)
