from __future__ import annotations

from pathlib import Path

import pytest
from edgeq_device.engines.catalog import engines, find_plugin

from edgeq.errors import HardwareError, UsageError
from edgeq.hardware.target import resolve
from edgeq.prove.builds import must_decide
from edgeq.run.engines import DEFAULT, build_device_table, choose_engine, load_engines
from edgeq.run.session import SessionSettings
from edgeq.util.folders import shipped
from edgeq.util.records import plain
from tests.fake_engine import DESCRIPTION

SHIPPED = load_engines(shipped("targets") / "engines")


def test_devices_get_to_know_the_same() -> None:
    file = shipped("targets") / "runtime" / "edgeq_device" / "engines" / "engines.json"
    assert file.read_text("utf-8") == build_device_table(SHIPPED), "run scripts/engines_json.py"
    assert {name: engine.to_dict() for name, engine in engines().items()} == {
        name: engine.to_dict() for name, engine in SHIPPED.items()
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_a_description_is_whole(name: str) -> None:
    engine = SHIPPED[name]
    assert next(iter(engine.precisions)) == "f32", "what is chosen unless something else is"
    assert bool(engine.module) == bool(engine.libraries) == (name != DEFAULT)
    assert engine.packages
    assert engine.verified.startswith(("executed", "never run"))
    assert set(engine.why) - set(engine.source) <= {"devices", "oldest", "packages", "precisions"}
    registered = bool(engine.module) and not engine.by_name
    assert find_plugin(engine.provider) == (engines()[name] if registered else None)
    assert bool(engine.int8.operators and engine.int8.backend) is False


def test_an_engine_is_chosen_by_name_and_precision() -> None:
    assert choose_engine("openvino").precision == "f32"
    choice = choose_engine("openvino:bf16")
    assert (choice.engine.name, choice.precision, choice.name) == ("openvino", "bf16", "openvino:bf16")
    with pytest.raises(UsageError, match=r"unknown engine 'openvin'. Did you mean openvino\?"):
        choose_engine("openvin")
    with pytest.raises(UsageError, match=r"openvino has no precision 'int8'. Known: bf16, f16, f32"):
        choose_engine("openvino:int8")


def test_a_record_of_settings_has_the_engine_by_name() -> None:
    record = plain(SessionSettings(engine=SHIPPED["openvino"], precision="bf16"))
    assert (record["engine"], record["precision"]) == ("openvino", "bf16")
    assert plain(SessionSettings())["engine"] is None


def test_precisions_are_those_that_the_hardware_has() -> None:
    engine = SHIPPED["openvino"]
    assert engine.fast_precisions(frozenset({"avx2"})) == ("f32",)
    assert engine.fast_precisions(frozenset({"avx512_bf16"})) == ("f32", "bf16")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("title =", "titel ="), "titel"),
        (('verified = "a test"', ""), "verified"),
        (('pairs = ["U8S8"]', "pairs = 3"), "int8.*pairs"),
    ],
)
def test_a_malformed_description_is_one_line(change: tuple[str, str], line: str, tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text(DESCRIPTION.replace(*change))
    with pytest.raises(HardwareError, match=rf"odd\.toml.*{line}"):
        load_engines(tmp_path)


@pytest.mark.parametrize(
    ("target", "saturates", "level"),
    [
        ("haswell", True, "AVX2"),
        ("x86-64-avx512", True, "AVX512_CORE"),
        ("alder-lake", False, "AVX2_VNNI"),
        ("cascade-lake", False, "AVX512_CORE_VNNI"),
        ("raspberry-pi-4", False, None),
    ],
)
def test_engines_are_limited_to_the_features_of_another_cpu(target: str, saturates: bool, level: str | None) -> None:
    engine, there = SHIPPED["openvino"], resolve(target)
    full = there.profile.scheme.replace(reduce_range=False)
    assert engine.has_saturating_kernels(full.pair, there.architecture, there.features) is saturates
    assert not engine.has_saturating_kernels("U8U8", "x86_64", there.features)
    assert engine.cap.environment(there.features).get(engine.cap.variable) == level
    assert must_decide(there, full, {}, engine) is saturates
    assert not must_decide(there, full, {"reduce_range": True}, engine)
