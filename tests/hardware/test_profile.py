from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from edgeq_device.system.gpus import Gpu

from edgeq.errors import HardwareError
from edgeq.hardware.detect import Machine
from edgeq.hardware.profile import ANY, Profile, load_profiles, match_profile
from edgeq.run.engines import find_only_engine
from edgeq.scheme import Scheme
from edgeq.util.folders import shipped
from edgeq.util.records import plain

SHIPPED = shipped("profiles")
PROFILES = load_profiles([SHIPPED])
CHOICES = {
    "mode",
    "format",
    "activation_type",
    "weight_type",
    "activation_symmetric",
    "weight_symmetric",
    "per_channel",
    "reduce_range",
    "method",
}
SATURATING = {"x86-64", "x86-64-avx2", "x86-64-avx512"}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_every_default_has_a_reason_and_a_source(profile: Profile) -> None:
    chosen = set(CHOICES) | {"min_onnxruntime"}
    if profile.scheme.dynamic_weight_types:
        chosen.add("dynamic")
    default = Scheme()
    chosen |= {
        f.name
        for f in dataclasses.fields(Scheme)
        if f.name != "dynamic_weight_types" and getattr(profile.scheme, f.name) != getattr(default, f.name)
    }
    assert chosen <= profile.why.keys()
    assert chosen <= profile.source.keys()
    assert profile.why.keys() == profile.source.keys()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda p: p.stem)
def test_a_file_gives_the_reason_for_what_it_sets(path: Path) -> None:
    import tomllib

    content = tomllib.loads(path.read_text(encoding="utf-8"))
    set_here = {*content.get("scheme", {}), *(["dynamic"] if "dynamic" in content else [])}
    assert set_here <= content.get("why", {}).keys(), "an inherited reason may not fit the new value"
    assert set_here <= content.get("source", {}).keys()


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_saturation_and_reduced_range_go_together(profile: Profile) -> None:
    saturates = bool(profile.hazards.get("saturates_int16"))
    assert saturates == (profile.name in SATURATING)
    assert profile.scheme.reduce_range == saturates


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_backends_and_their_shapes(profile: Profile) -> None:
    scheme = profile.scheme
    match profile.backend:
        case "cpu":
            assert scheme.format == "QDQ"
            assert dict(scheme.dynamic_weight_types) == dict.fromkeys(
                ("Attention", "GRU", "Gather", "Gemm", "LSTM", "MatMul"), "int8"
            )
        case "tensorrt":
            assert (scheme.pair, scheme.activation_symmetric, scheme.weight_symmetric) == ("S8S8", True, True)
            assert profile.min_compute_capability is not None
        case "systolic":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QOperator", "S8S8", False)
            assert scheme.activation_symmetric
            assert scheme.weight_symmetric
        case "web":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QDQ", "U8S8", True)
            assert not scheme.reduce_range
        case "qnn":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QDQ", "U8S8", True)
        case "litert":
            assert (scheme.format, scheme.pair) == ("QDQ", "S8S8")
            assert scheme.per_channel == (profile.name != "litert-npu-per-tensor")
        case "neural-art":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QDQ", "S8S8", True)
            assert not scheme.activation_symmetric
        case "espdl":
            assert (scheme.format, scheme.pair, scheme.scale) == ("QDQ", "S8S8", "power-of-two")
            assert scheme.activation_symmetric
            assert scheme.weight_symmetric
        case "rknn":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QDQ", "S8S8", True)
            assert not scheme.activation_symmetric
        case "ncnn":
            assert (scheme.format, scheme.pair, scheme.per_channel) == ("QDQ", "S8S8", True)
            assert scheme.activation_symmetric
        case _:
            pytest.fail(f"no backend is called {profile.backend}")


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_the_default_is_in_the_search_space(profile: Profile) -> None:
    for name, values in profile.search.items():
        if name == "session_options":
            assert all(value == [str(v) for v in value] for value in values.values())
        else:
            assert getattr(profile.scheme, name) in values


def test_no_two_profiles_that_could_meet_tie() -> None:
    # Targets with an engine of their own are chosen by name, and rank below all others in a bundle.
    matched = [profile for profile in PROFILES.values() if find_only_engine(profile.backend) is None]
    for a, b in itertools.combinations(matched, 2):
        if a.architecture == b.architecture or ANY in (a.architecture, b.architecture):
            assert a.rank != b.rank, (a.name, b.name)
        if a.includes(b):
            assert a.rank > b.rank
        if b.includes(a):
            assert b.rank > a.rank


def test_every_profile_is_plain_json() -> None:
    for profile in PROFILES.values():
        record = plain(profile)
        assert json.loads(json.dumps(record)) == record


def test_emulated_cpus_are_ones_that_exist_in_qemu() -> None:
    # Other x86 models of QEMU (Skylake-Server, Icelake-Server, EPYC-Genoa) silently become AVX2 machines.
    for profile in PROFILES.values():
        qemu = profile.emulate.get("qemu", {})
        assert qemu.get("cpu") in {None, "Nehalem", "Haswell", "cortex-a53", "cortex-a76", "neoverse-n2"}


def test_a_gpu_wins_over_the_cpu_only_with_its_runtimes() -> None:
    gpus = (Gpu("small", (7, 5)), Gpu("big", (9, 0)))
    bare = Machine("x86_64", PROFILES["x86-64-avx2"].requires, gpus=gpus)
    assert match_profile(bare, PROFILES).profile.name == "x86-64-avx2"
    full = dataclasses.replace(bare, runtimes={"onnxruntime-gpu": "1.31.1", "tensorrt": "10.9"})
    match = match_profile(full, PROFILES)
    assert match.profile.name == "nvidia-sm90"
    assert "big with compute capability 9.0" in match.reasons


def test_an_old_onnxruntime_is_lacking() -> None:
    machine = Machine("x86_64", PROFILES["x86-64-avx2"].requires, runtimes={"onnxruntime": "1.9.0"})
    assert PROFILES["x86-64-avx2"].missing(machine) == ("onnxruntime 1.19 (here 1.9.0)",)
    with pytest.raises(HardwareError, match=r"no profile fits this x86_64 machine: cpu-any lacks onnxruntime 1.19"):
        match_profile(machine, PROFILES)


BASE = """
title = "base"
architecture = "x86_64"
rank = 1
backend = "cpu"
min_onnxruntime = "1.20"
[scheme]
weight_type = "int8"
[why]
weight_type = "because"
[source]
weight_type = "a book"
"""


def folder(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / f"{name}.toml").write_text(text, encoding="utf-8")
    return root


def test_inheritance_adds_requirements_and_merges_tables(tmp_path: Path) -> None:
    first = 'extends = "base"\ntitle = "first"\nrequires = ["avx2"]\nrank = 2\n[emulate]\nmask = ["a"]\n'
    second = 'extends = "first"\nrequires = ["avx_vnni"]\nrank = 3\n[scheme]\nreduce_range = true\n'
    profiles = load_profiles([folder(tmp_path / "p", base=BASE, first=first, second=second)])
    assert list(profiles) == ["base", "first", "second"]
    assert profiles["second"].requires == {"avx2", "avx_vnni"}
    assert profiles["second"].title == "first"
    assert profiles["second"].scheme.reduce_range
    assert profiles["second"].scheme.weight_type == "int8"
    assert profiles["second"].emulate == {"mask": ["a"]}
    assert not profiles["first"].scheme.reduce_range


def test_a_users_profile_is_merged_over_the_shipped_one(tmp_path: Path) -> None:
    own = folder(
        tmp_path / "own",
        base='[scheme]\nweight_type = "uint8"\n',
        extra='extends = "base"\nrank = 9\nrequires = ["x"]\n',
    )
    profiles = load_profiles([folder(tmp_path / "shipped", base=BASE), own])
    assert profiles["base"].scheme.weight_type == "uint8"
    assert profiles["base"].title == "base"
    assert profiles["base"].why["weight_type"] == f"set in {own / 'base.toml'}", "the old reason does not fit"
    assert profiles["extra"].requires == {"x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnak = 1\n", r"base.toml: unknown key 'rnak' at the top. Did you mean rank\?"),
        (
            "[scheme]\nper_chanel = true\n",
            r"base.toml: unknown key 'per_chanel' in \[scheme\]. Did you mean per_channel",
        ),
        ("rank = true\n", r"base.toml: rank is True. Make it a whole number"),
        ("[scheme]\nper_channel = 'yes'\n", r"base.toml: scheme.per_channel is 'yes'. Make it true or false"),
        ("min_onnxruntime = 'new'\n", r"base.toml: min_onnxruntime is 'new'. Make it a version such as \"1.20\""),
        ("[why]\nper_channel = ' '\n", r"base.toml: why.per_channel is ' '. Make it text"),
        ("[search]\nmethod = []\n", r"base.toml: search.method is \[\]. Make it a list of values"),
        ("[emulate.qemu]\nmin_version = 8\n", r"base.toml: emulate.qemu.min_version is 8. Make it"),
        ("scheme = 3\n", r"base.toml: scheme is 3. Make it a table: \[scheme\]"),
        ("title = 'x'\n", r"base.toml: architecture is missing"),
        (
            BASE.replace('"int8"', '"int4"'),
            r"base.toml: scheme.weight_type is 'int4'. It can be int8, uint8",
        ),
        (
            BASE + "[search]\nmethod = ['minmax', 'guess']\n",
            r"base.toml: \[search.method\]: unknown calibration method 'guess'",
        ),
        (
            BASE + "[scheme.session_options]\n'session.node_partition_config_file' = 'x'\n",
            r"base.toml: session option 'session.node_partition_config_file' is not one that a bundle may set",
        ),
        (
            BASE + "[search.session_options]\n'session.x64quantprecision' = ['0', '2']\n",
            r"base.toml: session option 'session.x64quantprecision' is '2'; it can be 0, 1",
        ),
        (
            BASE + "[scheme.session_options]\n'session.model_external_initializers_file_folder_path' = 'x'\n",
            r"base.toml: session option .* is one that the writer of the bundle sets itself",
        ),
        ("extends = 'bas'\n" + BASE, r"base.toml: extends 'bas', which is unknown. Did you mean base\?"),
        ("extends = 'base'\n" + BASE, r"base.toml: extends 'base' in a circle"),
        ("min_compute_capability = '8." + "9" * 5000 + "'\n" + BASE, "min_compute_capability"),
        ("min_compute_capability = '8'\n" + BASE, r"base.toml: min_compute_capability is '8'. Write it as \"8.6\""),
        ("title = \n", r"base.toml is not TOML"),
        (
            BASE + "[hazards]\nsaturates_int16 = ['u8s8']\n",
            r"base.toml: hazards.saturates_int16.0 is 'u8s8'. Make it a pair of types such as \"U8S8\"",
        ),
        (BASE + "[hazards.remedy_cost]\nreduce_range = -1\n", r"base.toml: hazards.remedy_cost.reduce_range is -1"),
        (
            BASE + "[hazards.remedy_cost]\nreduce_rnge = 1\n",
            r"base.toml: hazards.remedy_cost has 'reduce_rnge', which is not a mitigation. Did you mean reduce_range\?",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        load_profiles([folder(tmp_path, base=text)])


def test_ties_are_refused(tmp_path: Path) -> None:
    other = BASE.replace('title = "base"', 'title = "other"\nrequires = ["avx2"]')
    with pytest.raises(HardwareError, match=r"rank 1 is not above 1 of base, which requires less"):
        load_profiles([folder(tmp_path / "a", base=BASE, other=other)])
    unrelated = BASE.replace('title = "base"', 'title = "base"\nrequires = ["amx_int8"]')
    with pytest.raises(HardwareError, match=r"rank 1 is also the rank of"):
        load_profiles([folder(tmp_path / "b", one=other, two=unrelated)])


def test_a_huge_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(HardwareError, match=r"big.toml is larger than 1 MiB"):
        load_profiles([tmp_path])
    (tmp_path / "big.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match=r"big.toml is not UTF-8"):
        load_profiles([tmp_path])
