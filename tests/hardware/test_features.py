from __future__ import annotations

import struct

import pytest
from edgeq_device.engines.catalog import read_vendor_of
from edgeq_device.system import features
from edgeq_device.system.features import Evidence, interpret

from tests.hardware.recorded import RECORDS, auxv, evidence_of


def test_every_spelling_of_a_feature_is_one() -> None:
    assert features.normalise(["AVX512VNNI", "avx512_vnni", "pni", "SSE4.1", "AVX1.0", "", "i8mm"]) == {
        "avx512_vnni",
        "sse3",
        "sse4_1",
        "avx",
        "i8mm",
    }


@pytest.mark.parametrize(
    ("word", "architecture"),
    [("AMD64", "x86_64"), ("x86_64", "x86_64"), ("ARM64", "arm64"), ("aarch64", "arm64"), ("ppc64le", "ppc64le")],
)
def test_architecture(word: str, architecture: str) -> None:
    assert features.normalise_architecture(word) == architecture


def test_counts_only_features_of_all_processors() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"
    assert features.parse_cpuinfo(text, "arm64") == {"fp", "asimd"}


def test_the_line_of_another_architecture_does_not_count() -> None:
    assert features.parse_cpuinfo("flags\t\t: sse avx2\n", "arm64") == frozenset()


def test_riscv_isa() -> None:
    assert features.parse_cpuinfo("isa\t\t: rv64imafdcv_zba_zvfh\n", "riscv64") == {
        *"imafdcv",
        "zba",
        "zvfh",
    }


@pytest.mark.parametrize("name", [name for name, r in RECORDS.items() if "hwcap" in r and r["machine"] == "aarch64"])
def test_hwcap_and_cpuinfo_agree(name: str) -> None:
    evidence = evidence_of(RECORDS[name])
    listed = features.parse_cpuinfo(evidence.cpuinfo, "arm64")
    if listed:
        assert features.parse_hwcap(*features.read_hwcap(evidence.auxv)) == listed
    else:
        assert interpret(evidence).source == "HWCAP"


def test_auxv_is_read_by_key_and_a_torn_one_is_no_error() -> None:
    assert features.read_hwcap(auxv(0x887, 0x2000)) == (0x887, 0x2000)
    assert features.read_hwcap(auxv(0x887, 0)[:-3]) == (0x887, 0)
    assert features.read_hwcap(b"") == (0, 0)
    assert features.parse_hwcap(0, 1 << 13) == {"i8mm"}
    assert features.parse_hwcap(1 << 20) == {"asimddp"}


def test_sysctl_counts_only_ones() -> None:
    text = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\nhw.optional.arm.FEAT_FP16: 1\n"
    assert features.parse_sysctl(text) == {"asimddp", "fphp", "asimdhp"}


def test_this_machine_answers() -> None:
    architecture, found = features.read_features()
    reading = interpret(features.gather())
    assert (architecture, found) == (reading.architecture, reading.features)
    assert architecture


def test_cpuid_counts_registers_that_the_system_saves() -> None:
    every = (0xFFFFFFFF,) * 4
    leaves = {(1, 0): every, (7, 0): every, (7, 1): every}
    assert features.cpuid_features(features.Answers(leaves, 0x602E7)) == features.FEATURES
    without_amx = features.cpuid_features(features.Answers(leaves, 0xE7))
    assert {"amx_int8", "avx512_vnni"} - without_amx == {"amx_int8"}
    avx_only = features.cpuid_features(features.Answers(leaves, 0x7))
    assert "avx2" in avx_only
    assert not any(name.startswith("avx512") for name in avx_only)
    assert features.cpuid_features(features.Answers(leaves, 0)) == {"sse", "sse2", "sse3", "ssse3", "sse4_1", "sse4_2"}
    assert features.cpuid_features(features.Answers({}, 0x602E7)) == frozenset()


def test_cpuid_of_this_machine_agrees_with_linux() -> None:
    evidence = features.gather()
    if evidence.cpuid is None or not features.parse_cpuinfo(evidence.cpuinfo, "x86_64"):
        pytest.skip("needs Linux on x86-64 with flags in /proc/cpuinfo, and leave to make code")
    answered = features.cpuid_features(evidence.cpuid)
    assert {"sse", "sse2"} <= answered
    assert answered <= features.FEATURES
    leaf_one_edx = evidence.cpuid.leaves[1, 0][3]
    listed = features.parse_cpuinfo(evidence.cpuinfo, "x86_64")
    # The oldest flags are never masked, so that the instruction and /proc/cpuinfo agree.
    assert bool(leaf_one_edx & 1) == ("fpu" in listed)
    assert bool(leaf_one_edx >> 4 & 1) == ("tsc" in listed)


def test_the_maker_of_the_cpu_is_who_cpuid_names() -> None:
    intel = (22, 0x756E6547, 0x6C65746E, 0x49656E69)
    amd = "processor\t: 0\nvendor_id\t: AuthenticAMD\n"
    assert read_vendor_of(Evidence("Linux", "x86_64", amd)) == "AuthenticAMD"
    under_an_emulator = Evidence("Linux", "x86_64", amd, cpuid=features.Answers({(0, 0): intel}, 0))
    assert read_vendor_of(under_an_emulator) == "GenuineIntel"
    assert read_vendor_of(Evidence("Linux", "aarch64")) == ""
    here = features.gather()
    if here.cpuid is not None and here.cpuinfo:
        assert read_vendor_of(here) == features.parse_identity(here.cpuinfo)["vendor_id"]


def test_machine_code_that_is_forbidden_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(features.mmap, "mmap", refuse)
    monkeypatch.setattr(features.sys, "platform", "linux")
    assert features.query_cpuid() is None


def test_a_silent_machine_has_no_features_and_no_source() -> None:
    reading = interpret(Evidence("Linux", "x86_64"))
    assert (reading.features, reading.source) == (frozenset(), "")


def test_auxv_entries_are_pairs_of_64_bit_words() -> None:
    assert struct.calcsize("<QQ") * 4 == len(auxv(0, 0))
