from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from edgeq_device.system.gpus import Gpu

from edgeq.errors import HardwareError
from edgeq.hardware import profile as schema
from edgeq.hardware.detect import Machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.hardware.target import is_known, load_targets, resolve
from edgeq.util.folders import shipped
from edgeq.util.records import plain
from tests.hardware.recorded import RECORDS, machine_of

PROFILES = load_profiles([shipped("profiles")])
HERE = machine_of(RECORDS["skylake-sp"])
TARGETS = load_targets(HERE)

# A new board needs one TOML file and one line here.
EXPECTED = {
    "this-machine": "x86-64-avx512",
    "generic-x86-64": "x86-64",
    "web-wasm": "wasm",
    "generic-arm64": "arm64-neon",
    "raspberry-pi-4": "arm64-neon",
    "raspberry-pi-5": "arm64-dotprod",
    "graviton2": "arm64-dotprod",
    "graviton3": "arm64-i8mm",
    "haswell": "x86-64-avx2",
    "cascade-lake": "x86-64-avx512-vnni",
    "zen4": "x86-64-avx512-vnni",
    "alder-lake": "x86-64-avx-vnni",
    "nvidia-t4": "nvidia-sm75",
    "nvidia-a100": "nvidia-sm80",
    "jetson-orin": "nvidia-sm86",
    "gemmini": "systolic-int8",
    **{f"hexagon-v{version}": "qualcomm-htp" for version in (68, 69, 73, 75, 79, 81)},
    **{f"snapdragon-{name}": "qualcomm-htp" for name in ("8-gen-2", "8-gen-3", "8-elite", "x-elite")},
    "qcs6490": "qualcomm-htp",
    "android-xnnpack": "litert-xnnpack",
    "raspberry-pi-5-litert": "litert-xnnpack",
    **{f"{name}-ncnn": "ncnn-arm" for name in ("android", "raspberry-pi-4", "raspberry-pi-5", "rk3588")},
    "cortex-m7": "litert-micro",
    "cortex-m55-ethos-u55": "litert-micro",
    "imx93": "litert-micro",
    **{f"ethos-u55-{macs}": "litert-micro" for macs in (32, 64, 128, 256)},
    **{f"ethos-u65-{macs}": "litert-micro" for macs in (256, 512)},
    **{f"ethos-u85-{macs}": "litert-micro" for macs in (128, 256, 512, 1024, 2048)},
    **dict.fromkeys(("stm32mp25", "stm32mp23", "genio-510", "genio-700", "imx8mp"), "litert-npu-per-tensor"),
    "coral-edge-tpu": "litert-npu-per-tensor",
    "stm32n6": "neural-art",
    **dict.fromkeys(("imx95", "mcxn947", "rt700"), "litert-npu"),
    **{f"rk{chip}": "rockchip-npu" for chip in (3588, 3576, 3566, 3568, 3562)},
    **{f"rv{chip}": "rockchip-npu" for chip in ("1126b", "1103", "1106")},
    **dict.fromkeys(("esp32", "esp32-s2", "esp32-c3", "esp32-c5", "esp32-c6"), "espdl-c"),
    "esp32-s3": "espdl-s3",
    "esp32-p4": "espdl-p4",
    "esp32-s31": "espdl-p4",
    **dict.fromkeys(("rock-5b", "orange-pi-5", "nanopi-r5s", "luckfox-pico-pro-max"), "rockchip-npu"),
}
RECORD_OF = {
    "raspberry-pi-4": "cortex-a72",
    "raspberry-pi-5": "cortex-a76",
    "graviton2": "neoverse-n1",
    "graviton3": "neoverse-v1",
    "haswell": "haswell",
    "cascade-lake": "cascade-lake",
    "zen4": "zen4",
    "alder-lake": "alder-lake",
}


def test_the_shipped_targets() -> None:
    assert {name: target.profile.name for name, target in TARGETS.items()} == EXPECTED
    assert not set(TARGETS) & set(PROFILES), "a name means one thing"


ANYWHERE = {"this-machine", "generic-x86-64", "generic-arm64", "web-wasm"}


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - ANYWHERE))
def test_the_device_would_choose_the_same_profile(name: str) -> None:
    target = TARGETS[name]
    capability = target.device.get("compute_capability")
    gpus = (Gpu(name, tuple(int(part) for part in capability.split("."))),) if capability else ()
    runtimes = {"onnxruntime-gpu": "1.31.1", "tensorrt": "10.9"} if capability else {}
    runtimes |= dict.fromkeys(target.profile.requires_runtimes, "2.7.0") if not capability else {}
    machine = Machine(target.architecture, target.features, gpus=gpus, runtimes=runtimes)
    assert match_profile(machine, PROFILES).profile.name == target.profile.name


@pytest.mark.parametrize(("name", "record"), RECORD_OF.items())
def test_the_stated_features_are_the_recorded_ones(name: str, record: str) -> None:
    assert TARGETS[name].features <= machine_of(RECORDS[record]).features


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_a_generic_target_is_right_on_every_machine_of_its_architecture(architecture: str) -> None:
    generic = next(t for t in TARGETS.values() if t.name.startswith("generic") and t.architecture == architecture)
    assert generic.profile.requires == frozenset()
    for profile in PROFILES.values():
        if profile.architecture == architecture and profile.backend == "cpu":
            assert profile.includes(generic.profile)
            saturating = set(profile.hazards.get("saturates_int16", ()))
            assert not saturating or generic.profile.scheme.reduce_range


def test_every_target_is_plain_json() -> None:
    for target in TARGETS.values():
        record = plain(target)
        assert json.loads(json.dumps(record)) == record


def test_auto_follows_the_machine_at_hand() -> None:
    arm = machine_of(RECORDS["neoverse-v1"])
    for name in ("auto", "this-machine"):
        target = resolve(name, arm)
        assert (target.name, target.profile.name, target.architecture) == ("this-machine", "arm64-i8mm", "arm64")
        assert target.features == arm.features


def test_a_profile_is_a_target_too() -> None:
    target = resolve("x86-64-avx2")
    assert target.profile.name == target.name == "x86-64-avx2"
    assert target.features == PROFILES["x86-64-avx2"].requires


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rasberry-pi-5", r"unknown target or profile 'rasberry-pi-5'. Did you mean raspberry-pi-5\?"),
        ("nano", r"Did you mean nanopi-r5s\?"),
        ("avx-vnni", r"Did you mean x86-64-avx-vnni\?"),
        ("quux", r"List them with `edgeq info targets`"),
        ("raspi", r"raspi can be several targets. Choose one: raspberry-pi-4 \(.*\); raspberry-pi-5 \("),
        ("iPhone", r"no target for iPhone: .*Core ML.* The nearest target is generic-arm64"),
        ("absent.toml", r"absent.toml cannot be read"),
    ],
)
def test_an_unknown_name_brings_the_nearest(name: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("rpi5", "raspberry-pi-5"),
        ("coral", "coral-edge-tpu"),
        ("RPi-5", "raspberry-pi-5"),
        ("jetson", "jetson-orin"),
        ("Pixel", "android-xnnpack"),
    ],
)
def test_an_alias_leads_to_its_target(name: str, target: str) -> None:
    assert is_known(name)
    assert resolve(name).name == target


def test_an_alias_never_hides_a_name() -> None:
    """A name of a target or profile wins, so an alias of the same name would never be used."""
    names = {"auto", *PROFILES, *load_targets()}
    contents = [tomllib.loads(path.read_text(encoding="utf-8")) for path in shipped("targets").glob("*.toml")]
    aliases = {name for content in contents for name in [*content.get("aliases", ()), *content.get("nearest_for", ())]}
    assert aliases
    assert not aliases & names


def test_a_target_by_path_overrides_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "my-board.toml"
    path.write_text(
        'title = "My board"\nextends = "arm64-dotprod"\nfeatures = ["bf16"]\n'
        "[scheme]\nper_channel = false\n[device]\ncores = 2\n",
        encoding="utf-8",
    )
    target = resolve(path)
    assert (target.name, target.title, target.profile.name) == ("my-board", "My board", "arm64-dotprod")
    assert not target.profile.scheme.per_channel
    assert target.profile.why["per_channel"] == f"set in {path}"
    assert target.profile.title == PROFILES["arm64-dotprod"].title
    assert target.features == {"asimddp", "bf16"}
    assert target.device == {"cores": 2}
    assert PROFILES["arm64-dotprod"].scheme.per_channel


def test_a_board_s_architecture_and_features_are_spelled_as_devices_report_them(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    for architecture in ("aarch64", "ARM64", "any"):
        path.write_text(
            f'title = "x"\nextends = "arm64-neon"\narchitecture = "{architecture}"\nfeatures = ["NEON", "dotprod"]\n',
            encoding="utf-8",
        )
        target = resolve(path)
        assert (target.architecture, target.profile.architecture) == ("arm64", "arm64")
        assert target.features == {"asimd", "asimddp"}
    path.write_text('extends = "x86-64-avx2"\nrequires = ["AVX512VNNI"]\nrank = 25\n', encoding="utf-8")
    assert "avx512_vnni" in resolve(path).profile.requires


def test_a_profile_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "x86-64-avx2"\nrequires = ["avx512f"]\nrank = 25\n', encoding="utf-8")
    target = resolve(path)
    assert target.profile.name == "mine"
    assert target.profile.requires == PROFILES["x86-64-avx2"].requires | {"avx512f"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "x"\n', r"t.toml: extends is missing"),
        ('extends = "arm64-neon"\n', r"t.toml: title is missing"),
        (
            'title = "x"\nextends = "arm64-nen"\n',
            r"t.toml: extends 'arm64-nen', which is unknown. Did you mean arm64-neon",
        ),
        (
            'title = "x"\nextends = "arm64-neon"\nbackend = "gpu9"\n',
            r"t.toml: unknown backend 'gpu9'. Known: cpu, espdl, litert, ncnn, neural-art, qnn, rknn, systolic, ",
        ),
        ('title = "x"\nextends = "arm64-neon"\n[systolic]\ndmi = 16\n', r"t.toml: unknown key 'dmi' in \[systolic\]"),
        (
            'title = "x"\nextends = "arm64-neon"\n[runtime]\npython = 3.11\n',
            r"t.toml: runtime.python is 3.11. Make it a version",
        ),
        (
            'title = "x"\nextends = "arm64-neon"\n[device]\ncores = 0\n',
            r"t.toml: device.cores is 0. Make it a whole number above 0",
        ),
        (
            'title = "x"\nextends = "arm64-neon"\narchitecture = "amd64"\n',
            r"t.toml: architecture is 'x86_64', but arm64-neon is for arm64. Extend a profile for x86_64",
        ),
        (
            'title = "x"\nextends = "arm64-neon"\n[scheme.session_options]\n"ep.context_file_path" = "x"\n',
            r"t.toml: session option 'ep.context_file_path' is not one that a bundle may set",
        ),
        (
            'title = "x"\nextends = "x86-64-avx2"\n[hazards]\nsaturates_int16 = ["U8-S8"]\n',
            r"t.toml: hazards.saturates_int16.0 is 'U8-S8'. Make it a pair of types",
        ),
    ],
)
def test_a_bad_target_is_refused_by_name_and_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.toml").write_text(text, encoding="utf-8")
    with pytest.raises(HardwareError, match=message):
        resolve(tmp_path / "t.toml")


def test_a_users_target_is_merged_over_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "user_folder", lambda kind: tmp_path)
    own = tmp_path / "targets"
    own.mkdir()
    (own / "raspberry-pi-5.toml").write_text("[device]\nmemory_mib = 16384\n", encoding="utf-8")
    (own / "lab.toml").write_text('title = "Lab"\nextends = "auto"\n', encoding="utf-8")
    targets = load_targets(HERE)
    assert targets["raspberry-pi-5"].device == {"cores": 4, "memory_mib": 16384}
    assert targets["lab"].profile.name == "x86-64-avx512"


def test_the_suffix_of_a_users_target_may_be_in_upper_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "user_folder", lambda kind: tmp_path)
    own = tmp_path / "targets"
    own.mkdir()
    (own / "Lab.TOML").write_text('title = "Lab"\nextends = "auto"\n', encoding="utf-8")
    assert resolve("Lab", HERE).title.startswith("Lab: ")
    if (own / "lab.toml").exists():
        return  # this file system ignores upper and lower case
    (own / "Lab.toml").write_text('title = "Other"\nextends = "auto"\n', encoding="utf-8")
    with pytest.raises(HardwareError, match=r"Lab.toml has the same name as Lab.TOML. Rename one"):
        resolve("Lab", HERE)
