"""Test that the calibration tables of a bundle contain the ranges that its variants use."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeq_device.bundle.package import open_bundle

from edgeq.bundle.verify import check_report, verify_bundle
from edgeq.calibration.ranges import Range, derive_ranges
from edgeq.calibration.table import read_tables
from edgeq.data.open_source import Data
from edgeq.hardware.target import resolve
from edgeq.jobs.bundles import used_ranges
from edgeq.jobs.package import package
from edgeq.model.graph import name_of
from edgeq.model.load import read_model
from edgeq.model.quant_params import params_of
from edgeq.prove.job import build
from edgeq.scheme import Scheme
from tests.backends.build import random
from tests.opened import open_job, variant_info

BUNDLE, TABLES = Path("bundle"), Path("tables")


@pytest.fixture
def heavy(place: Path) -> Path:
    """Replace the samples with ones that have a few large values, which every method cuts at another place."""
    samples = random(4, 8, 8, 8) ** 5
    np.savez("calib.npz", x=samples)
    return place


def bundle_of(*targets: str, **scheme: Any) -> dict[str, dict[str, Any]]:
    """Package `net.onnx` and return the bundle's entry for each variant by name."""
    package(
        Path("net.onnx"),
        Data("calib.npz"),
        BUNDLE,
        targets=targets,
        overrides=scheme,
        timed=False,
        emulate=False,
        effort=None,
    )
    check_report(verify_bundle(BUNDLE))
    if (BUNDLE / "calibration.zip").exists():
        shutil.unpack_archive(BUNDLE / "calibration.zip", TABLES)
    return {name: variant_info(BUNDLE, name) for name in targets}


def magnitudes_in_file(variant: str) -> dict[str, float]:
    """Return the largest magnitude that each QuantizeLinear of a variant represents, by the name of its input."""
    with open_bundle(BUNDLE) as bundle:
        (file,) = [v.model for v in bundle.components["model"] if v.name == variant]
        graph = read_model(Path(file)).graph
    found = {}
    for node in graph:
        params = params_of(node) if node.op_type == "QuantizeLinear" else None
        if params is not None:
            low, high = (replace(params, narrow=True) if params.low < 0 else params).range
            found[name_of(node.inputs[0])] = max(-low, high)
    return found


@pytest.mark.parametrize(
    "scheme",
    [
        {"method": "minmax"},
        {"method": "percentile", "method_options": {"percentile": 99.0}},
        {"method": "entropy"},
        {"method": "mse"},
        {"method": "mse", "activation_symmetric": True, "activation_type": "int8"},
        {"method": "moving-average"},
    ],
    ids=lambda scheme: "-".join(map(str, scheme.values())),
)
def test_a_table_has_the_ranges_of_the_file(heavy: Path, scheme: dict[str, Any]) -> None:
    ((name, info),) = bundle_of("haswell", **scheme).items()
    table = read_tables(TABLES / info["calibration"])
    used = {tensor: bound for tensor, bound in magnitudes_in_file(name).items() if tensor in table}
    assert len(used) > 3
    for tensor, bound in used.items():
        # The rounding of an asymmetric range's zero point moves its ends by up to half a step.
        assert table[tensor] == pytest.approx(bound, rel=1 / 250), tensor


def test_variants_with_other_ranges_have_tables_of_their_own(heavy: Path) -> None:
    """Variants with symmetric and asymmetric integers have tables of their own, because their best ranges differ."""
    infos = bundle_of("haswell", "cascade-lake", "jetson-orin", method="mse")
    places = {name: infos[name]["calibration"] for name in ("haswell", "cascade-lake", "jetson-orin")}
    assert places["haswell"] == places["cascade-lake"] != places["jetson-orin"]
    assert sorted(set(places.values())) in (["calibration", f"calibration/{n}"] for n in ("haswell", "jetson-orin"))
    for name, place in places.items():
        table = read_tables(TABLES / place)
        shared = magnitudes_in_file(name).keys() & table.keys()
        assert shared
        for tensor in shared:
            assert table[tensor] == pytest.approx(magnitudes_in_file(name)[tensor], rel=1 / 250), (name, tensor)


def test_variants_that_have_no_ranges_have_no_table(place: Path) -> None:
    (info,) = bundle_of("haswell", mode="dynamic", dynamic_weight_types={"Conv": "uint8"}).values()
    assert "calibration" not in info
    assert not TABLES.exists()


def test_tables_have_the_ranges_of_the_finished_file(place: Path) -> None:
    """The table has the ranges of the finished file, not those of the build, because a recovery may change a scale."""
    job = open_job(Path("net.onnx"), Data("calib.npz"), None, place)
    assert job.statistics is not None
    ranges = derive_ranges(job.statistics, "minmax")
    built = build(job, resolve("haswell"), Scheme(), place / "q.onnx")
    assert used_ranges(job, built) == ranges
    wider = {name: Range(2 * span.low, 2 * span.high) for name, span in ranges.items()}
    found = used_ranges(job, replace(built, ranges=wider))
    held = {name for name in found if found[name] != wider[name]}
    assert "x" in held
    for name in held:
        assert found[name].bound == pytest.approx(ranges[name].bound, rel=1 / 250)
