"""Test the choice of a variant and the reasons against the others."""

from __future__ import annotations

import pytest
from edgeq_device.bundle.select import judge, select
from edgeq_device.errors import BundleError

from .fakes import bundle, device, variant

BASE = variant("base")
AVX2 = variant("avx2", required_features=("avx2", "fma"), rank=30)
VNNI = variant("vnni", required_features=("avx512_vnni",), rank=50)
ARM = variant("arm", architecture="arm64", rank=99)
CUDA = variant("cuda", ep="CUDAExecutionProvider", architecture="any", rank=80)
EVERY = bundle(BASE, AVX2, VNNI, ARM, CUDA)


@pytest.mark.parametrize(
    ("features", "expected"),
    [("", "base"), ("avx2", "base"), ("avx2 fma", "avx2"), ("avx2 fma avx512_vnni", "vnni"), ("avx512_vnni", "vnni")],
)
def test_the_highest_rank_that_fits_wins(features: str, expected: str) -> None:
    assert select(EVERY, device(features)).variant.name == expected


def test_reasons_for_the_others() -> None:
    choice = select(EVERY, device("avx2 fma"))
    assert choice.why == "rank 30 is the highest here; this device has avx2, fma"
    reasons = {verdict.variant.name: verdict.reasons for verdict in choice.others}
    assert reasons == {
        "base": (),
        "vnni": ("this device has no avx512_vnni",),
        "arm": ("it is for arm64, this device is x86_64",),
        "cuda": ("onnxruntime 1.31.1 here has no CUDAExecutionProvider",),
    }


def test_the_provider_decides_too() -> None:
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert select(EVERY, device("avx2 fma", providers=providers)).variant.name == "cuda"


def test_the_first_wins_a_tie() -> None:
    first, second = variant("first", rank=7), variant("second", rank=7)
    assert select(bundle(first, second), device()).variant is first


@pytest.mark.parametrize(
    ("minimum", "runtime", "fits"),
    [
        ("", "1.17.0", True),
        ("1.17", "1.17.0", True),
        ("1.24", "1.9.1", False),
        ("1.24", "1.24.0rc1", True),
        ("1.24.1", "1.24", False),
        ("1.9", "1.31.1", True),
        ("2.0", "1.31.1", False),
    ],
)
def test_the_runtime_must_be_new_enough(minimum: str, runtime: str, fits: bool) -> None:
    verdict = judge(variant(min_onnxruntime=minimum), device(runtime=runtime))
    assert verdict.fits is fits
    assert fits or verdict.reasons == (f"it needs onnxruntime {minimum}, this device has {runtime}",)


def test_variants_of_other_runtimes_are_not_chosen() -> None:
    assert judge(variant(model=None), device()).reasons == ("ONNX Runtime does not run it",)


def test_nothing_fits() -> None:
    with pytest.raises(BundleError) as refusal:
        select(bundle(VNNI, ARM), device())
    text = str(refusal.value)
    assert "vnni: this device has no avx512_vnni" in text
    assert "arm: it is for arm64, this device is x86_64" in text
    assert refusal.value.exit_code == 7


def test_names_a_newer_runtime_if_only_its_age_is_wrong() -> None:
    old = device("avx2 fma", runtime="1.18.1")
    wanted = (variant("later", min_onnxruntime="1.24"), variant("sooner", min_onnxruntime="1.20"), ARM)
    with pytest.raises(BundleError, match=r"Install onnxruntime 1\.20 or newer"):
        select(bundle(*wanted), old)
    both = variant("both", min_onnxruntime="1.20", required_features=("avx512_vnni",))
    with pytest.raises(BundleError, match="Package the model for a target of this device's kind"):
        select(bundle(both), old)


def test_a_named_variant() -> None:
    assert select(EVERY, device("avx2 fma"), name="base").variant is BASE
    with pytest.raises(BundleError, match="variant arm does not run here: it is for arm64"):
        select(EVERY, device(), name="arm")
    with pytest.raises(BundleError, match="It has base, avx2, vnni, arm, cuda"):
        select(EVERY, device(), name="x")


def test_an_unknown_component() -> None:
    with pytest.raises(BundleError, match="has no component float32"):
        select(EVERY, device(), "float32")
