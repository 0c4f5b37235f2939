"""Files that variants have in common are stored once."""

from __future__ import annotations

from pathlib import Path

from edgeq.bundle.sharing import ModelFiles, StoredFile, share_files


def files(model: str, **external: str) -> ModelFiles:
    return ModelFiles(
        StoredFile(Path(model), model), {name: StoredFile(Path(text), text) for name, text in external.items()}
    )


def test_one_variant_keeps_all_its_files() -> None:
    placements, assets = share_files({"a": files("m1", w="w1")})
    assert assets == {}
    assert placements["a"].model_file == "model.onnx"
    assert set(placements["a"].files) == {"model.onnx", "w"}


def test_equal_models_without_weights_are_one_asset() -> None:
    placements, assets = share_files({"a": files("m1"), "b": files("m2"), "c": files("m1")})
    assert placements["a"] == placements["c"]
    assert placements["a"].files == {}
    assert placements["b"].model_file == "model.onnx"
    assert [Path(path).name for path in assets] == ["model.onnx"]


def test_equal_models_and_weights_lie_together() -> None:
    placements, assets = share_files({"a": files("m1", w="w1"), "b": files("m1", w="w1")})
    assert placements["a"].weights == ""
    assert placements["a"].model_file.startswith("sha256:")
    assert sorted(Path(path).name for path in assets) == ["model.onnx", "w"]


def test_equal_weights_are_one_asset_though_models_differ() -> None:
    placements, assets = share_files({"a": files("m1", w="w1"), "b": files("m2", w="w1")})
    assert placements["a"].weights == placements["b"].weights != ""
    assert set(placements["a"].files) == {"model.onnx"}
    assert [Path(path).name for path in assets] == ["w"]


def test_weights_in_common_are_one_asset_with_all_that_its_users_need() -> None:
    placements, assets = share_files({"a": files("m1", v="v1", w="w1"), "b": files("m2", w="w1", x="x1")})
    assert placements["a"].weights == placements["b"].weights != ""
    assert sorted(Path(path).name for path in assets) == ["v", "w", "x"]


def test_weights_of_one_name_that_differ_stay_apart() -> None:
    placements, assets = share_files({"a": files("m1", v="v1", w="w1"), "b": files("m2", v="v2", w="w1")})
    assert assets == {}
    assert set(placements["b"].files) == {"model.onnx", "v", "w"}


def test_a_model_twice_among_those_that_share_weights_is_there_once() -> None:
    placements, assets = share_files({"a": files("m1", w="w1"), "b": files("m2", w="w1"), "c": files("m1", w="w1")})
    assert placements["a"] == placements["c"]
    assert placements["a"].weights == placements["b"].weights != ""
    assert sorted(Path(path).name for path in assets) == ["model.onnx", "w"]
