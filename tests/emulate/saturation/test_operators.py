"""Test the operators' arithmetic against ONNX Runtime's, here and on emulated kernels that saturate."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from edgeq.hardware.detect import detect_machine
from edgeq.hardware.profile import load_profiles, match_profile
from edgeq.scheme import Scheme
from tests.emulate.saturation import cases
from tests.emulate.saturation.emulated_kernels import command, emulated
from tests.emulate.saturation.reference import simulate_layer


def some(count: int) -> list[cases.Case]:
    makers = (cases.matmul_integer, cases.qlinear_matmul, cases.qlinear_conv)
    return [*itertools.chain.from_iterable(make(count) for make in makers), *cases.others()]


@pytest.fixture(scope="module")
def saturates_natively() -> bool:
    return match_profile(detect_machine(), load_profiles()).profile.saturates(Scheme())


def test_equal_to_the_kernels_of_this_machine(tmp_path: Path, saturates_natively: bool) -> None:
    chosen = some(24)
    for case in chosen:
        case.save(tmp_path)
    cases.run_all(tmp_path, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as found:
        for case in chosen:
            got = simulate_layer(_node(case), case.arrays, saturating=saturates_natively)
            np.testing.assert_array_equal(found[f"{case.name}:y"], got, case.name)


@pytest.mark.slow
def test_equal_to_emulated_kernels_that_saturate(tmp_path: Path) -> None:
    prefix = command()
    if not prefix:
        pytest.skip("no qemu-user for this machine's architecture")
    chosen = some(100)
    for case in chosen:
        case.save(tmp_path)
    found = emulated(tmp_path, tmp_path / "out.npz", prefix)
    changed = 0
    for case in chosen:
        got = simulate_layer(_node(case), case.arrays)
        np.testing.assert_array_equal(found[f"{case.name}:y"], got, case.name)
        changed += not np.array_equal(got, simulate_layer(_node(case), case.arrays, saturating=False))
    assert changed > len(chosen) // 2


def _node(case: cases.Case) -> ir.Node:
    return ir.serde.deserialize_node(case.node)
