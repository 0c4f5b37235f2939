"""Test releases with wrong kernels and how edgeq handles them."""

from __future__ import annotations

import pytest
from edgeq_device.bundle.select import find_wrong_kernels, judge, select
from edgeq_device.engines.catalog import load_wrong_kernels
from edgeq_device.errors import BundleError

from edgeq.model.compatibility import wrong_table
from edgeq.util.folders import shipped

from .fakes import bundle, device, variant

INT8 = variant("int8", rank=9, info={"products": ["Conv u8s8"]})


def test_devices_read_what_the_table_says() -> None:
    file = shipped("targets") / "runtime" / "edgeq_device" / "engines" / "known_wrong.json"
    assert file.read_text("utf-8") == wrong_table(), "run scripts/engines_json.py"
    assert all(
        row.source.startswith("https://") and row.state and row.fix and row.products for row in load_wrong_kernels()
    )


@pytest.mark.parametrize(
    ("runtime", "features", "fits"),
    [("1.20.1", "amx_int8", True), ("1.24.4", "amx_int8", False), ("1.31.1", "amx_int8", True), ("1.24.4", "", True)],
)
def test_only_the_release_on_the_hardware(runtime: str, features: str, fits: bool) -> None:
    assert judge(INT8, device(features, runtime=runtime)).fits is fits


def test_the_device_takes_another_variant_and_says_why() -> None:
    here = device("amx_int8", runtime="1.24.4")
    choice = select(bundle(INT8, variant("s8", info={"products": ["Conv s8s8"]}), variant("old")), here)
    assert choice.variant.name == "s8"
    assert "computes Conv u8s8 wrongly" in choice.rejected[0].reasons[0]
    with pytest.raises(BundleError, match=r"computes Conv u8s8 wrongly.*Upgrade to onnxruntime"):
        select(bundle(INT8), here)
    with pytest.raises(BundleError, match="products is not a list of strings"):
        judge(variant(info={"products": "Conv u8s8"}), here)


def test_cores_with_dot_products_are_not_concerned() -> None:
    kinds = {kind for row in find_wrong_kernels("1.24", "arm64", {"asimd"}) for kind in row.products}
    assert "MatMul s8s8 with -128" in kinds
    assert not find_wrong_kernels("1.24", "arm64", {"asimd", "asimddp"})


@pytest.mark.parametrize(("runtime", "fits"), [("1.26.0", True), ("1.27.0", False), ("1.28.0", True)])
def test_a_float_fault_rejects_only_its_release(runtime: str, fits: bool) -> None:
    float_variant = variant("float", architecture="arm64", info={"products": ["Conv f32 with uneven padding"]})
    assert judge(float_variant, device("sme", "arm64", runtime)).fits is fits
