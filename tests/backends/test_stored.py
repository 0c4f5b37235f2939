from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeq.backends.cpu import LEAST_ELEMENTS, store_weights
from edgeq.model.edit import from_proto, to_proto
from edgeq.run.session import SessionSettings, open_session
from tests.backends.networks import model_of, operators, recurrent, run, sqnr_db
from tests.graphs import attributes

RANDOM = np.random.default_rng(0)
WIDE = RANDOM.normal(0, 1, (40, 32)).astype(np.float32) * np.geomspace(0.001, 1, 32, dtype=np.float32)


def product(op_type: str, weight: np.ndarray, **options: int) -> onnx.ModelProto:
    return model_of(f"[layer] y = {op_type}{attributes(options)}(x, w)", "float[N, 40] x", {"w": weight})


def stored(proto: onnx.ModelProto, op_types: list[str], names: tuple[str, ...], **options: Any) -> onnx.ModelProto:
    """Return the model after `store_weights`, and check that it stored exactly the weights `names`."""
    model = from_proto(proto)
    assert store_weights(model, op_types, **options) == names
    return to_proto(model)


def test_a_layer_keeps_its_answer() -> None:
    model = recurrent(hidden=32, width=16)
    x = {"x": RANDOM.normal(0, 1, (4, 1, 16)).astype(np.float32)}
    exact = run(model, x)
    model = stored(model, ["GRU"], ("w", "r"))
    onnx.checker.check_model(model)
    made = run(model, x)
    assert all(sqnr_db(exact[name], made[name]) > 38 for name in exact)


def test_the_file_shrinks_to_a_quarter() -> None:
    model = recurrent("RNN", hidden=128, width=128)
    before = len(model.SerializeToString())
    model = stored(model, ["RNN"], ("w", "r"))
    assert len(model.SerializeToString()) < 0.28 * before


def test_the_runtime_has_the_weights_in_float_when_it_is_loaded(tmp_path: Path) -> None:
    model = stored(recurrent(hidden=32, width=16), ["GRU"], ("w", "r"))
    path, optimized = tmp_path / "m.onnx", tmp_path / "optimized.onnx"
    onnx.save(model, path)
    open_session(path, SessionSettings(save_optimized_to=optimized))
    assert operators(optimized) == ["GRU"]


@pytest.mark.parametrize(
    ("op_type", "weight", "attributes"),
    [("MatMul", WIDE, {}), ("Gemm", WIDE, {}), ("Gemm", WIDE.T.copy(), {"transB": 1})],
)
def test_outputs_have_scales_of_their_own(op_type: str, weight: np.ndarray, attributes: dict[str, int]) -> None:
    model = product(op_type, weight, **attributes)
    x = {"x": RANDOM.normal(0, 1, (64, 40)).astype(np.float32)}
    exact = run(model, x)["y"]
    made = run(stored(model, [op_type], ("w",)), x)["y"]
    # The columns differ by a factor of a thousand. One scale would lose the smallest.
    assert min(sqnr_db(exact[:, i], made[:, i]) for i in range(32)) > 30


def test_convolutions_have_a_scale_per_output_channel() -> None:
    weight = RANDOM.normal(0, 1, (16, 8, 3, 3)).astype(np.float32) * np.geomspace(0.001, 1, 16)[:, None, None, None]
    for op_type, values in (("Conv", weight), ("ConvTranspose", weight.transpose(1, 0, 2, 3))):
        held = {"w": np.ascontiguousarray(values, np.float32)}
        model = model_of(f"[layer] y = {op_type}(x, w)", "float[1, 8, 6, 6] x", held)
        x = {"x": RANDOM.normal(0, 1, (1, 8, 6, 6)).astype(np.float32)}
        exact = run(model, x)["y"]
        made = run(stored(model, [op_type], ("w",)), x)["y"]
        assert min(sqnr_db(exact[:, i], made[:, i]) for i in range(16)) > 30


def test_stores_only_large_weights_of_listed_operators() -> None:
    stored(product("MatMul", WIDE), ["GRU"], ())
    stored(product("MatMul", WIDE), ["MatMul"], (), exclude=["layer"])
    small = np.ones((40, LEAST_ELEMENTS // 40), np.float32)
    stored(product("MatMul", small), ["MatMul"], ())


def test_a_weight_that_another_operator_reads_is_not_stored() -> None:
    model = model_of("[a] y = MatMul(x, w) [b] z = Neg(w)", "float[N, 40] x", {"w": WIDE}, ["y", "z"])
    stored(model, ["MatMul"], ())


def test_a_shared_weight_is_stored_once() -> None:
    model = model_of("[a] a = MatMul(x, w) [b] b = MatMul(x, w)", "float[N, 40] x", {"w": WIDE}, ["a", "b"])
    assert operators(stored(model, ["MatMul"], ("w",))).count("Cast") == 1
