from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeq.errors import ModelError
from edgeq.model.files import model_files
from edgeq.model.graph import opset_of
from edgeq.model.prepare import PreparedModel, prepare_model

from .build import model, node, rand, run, small_cnn, write

REPOSITORY = Path(__file__).resolve().parents[2]


def prepared(tmp_path: Path, proto: onnx.ModelProto, **kwargs: Any) -> tuple[PreparedModel, onnx.ModelProto]:
    result = prepare_model(write(tmp_path / "m.onnx", proto), tmp_path / "work", **kwargs)
    return result, onnx.load(result.path)


def assert_same_outputs(result: PreparedModel, feeds: dict[str, Any], tolerance: float = 1e-5) -> None:
    for before, after in zip(run(result.source, feeds), run(result.path, feeds), strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        np.testing.assert_allclose(after, before, rtol=tolerance, atol=tolerance * np.abs(before).max())


def types(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


class TestRealModels:
    @pytest.mark.parametrize(
        "name",
        [
            "lenet_mnist",
            "mlperf_tiny_ad",
            "mlperf_tiny_kws",
            "mlperf_tiny_vww",
            "mobilenet_v1_0.25_224",
            "nsnet2_gru",
            "resnet20_cifar10",
            "ultraface_rfb320",
            "yolox_nano",
        ],
    )
    def test_outputs_names_and_cleanliness(self, tmp_path: Path, shared_data: Path, name: str) -> None:
        source = shared_data / name / "model.onnx"
        result = prepare_model(source, tmp_path)
        original, proto = onnx.load(source), onnx.load(result.path)
        rng = np.random.default_rng(0)
        feeds = {
            i.name: rng.normal(size=[d if isinstance(d, int) else 2 for d in i.shape or ()]).astype(i.dtype)
            for i in result.signature.inputs
        }
        # The sums run in another order. ONNX Runtime's own two layouts of yolox_nano differ
        # by 3e-5 of the largest output.
        assert_same_outputs(result, feeds, 2e-4 if "SpaceToDepth" in types(proto) else 1e-5)
        assert "BatchNormalization" not in types(proto)
        assert {n.domain for n in proto.graph.node} == {""}
        assert [(o.domain, o.version) for o in proto.opset_import] == [("", 17)]
        assert all(n.name for n in proto.graph.node)
        made = {o for n in proto.graph.node for o in n.output if o}
        described = {v.name for v in [*proto.graph.value_info, *proto.graph.output]}
        assert made <= described
        # A tensor whose channels are in another order than in the original has another name.
        permuted = {f"{o}/space_to_depth" for n in original.graph.node if n.op_type == "Concat" for o in n.output}
        assert made <= {o for n in original.graph.node for o in n.output} | permuted
        if all(n.name for n in original.graph.node):
            assert {n.name for n in proto.graph.node} <= {n.name for n in original.graph.node}
        assert sorted(p.name for p in tmp_path.iterdir()) == ["prepared.onnx"]

    def test_notes_say_what_was_done(self, tmp_path: Path, shared_data: Path) -> None:
        result = prepare_model(shared_data / "mobilenet_v1_0.25_224" / "model.onnx", tmp_path)
        assert result.notes == ("27 BatchNormalization folded",)


class TestDeterminism:
    def test_the_same_bytes_in_other_processes_and_folders(self, tmp_path: Path) -> None:
        source = write(tmp_path / "m.onnx", small_cnn(opset=11))
        digests = {prepare_model(source, tmp_path / "w").digest}
        script = (
            "import sys; from pathlib import Path; from edgeq.model.prepare import prepare_model;"
            "print(prepare_model(Path(sys.argv[1]), Path(sys.argv[2])).digest)"
        )
        for seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-c", script, str(source), str(tmp_path / f"other{seed}")],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
                capture_output=True,
                text=True,
                check=True,
            )
            digests.add(done.stdout.strip())
        assert len(digests) == 1

    def test_a_second_run_replaces_the_first(self, tmp_path: Path) -> None:
        first, _ = prepared(tmp_path, small_cnn())
        second, _ = prepared(tmp_path, small_cnn())
        assert first == second


class TestOpset:
    @pytest.mark.parametrize("opset", [7, 8, 9, 11, 12])
    def test_raised_with_the_same_results(self, tmp_path: Path, opset: int) -> None:
        result, proto = prepared(tmp_path, small_cnn(opset=opset))
        assert opset_of(result.model) == 17
        assert f"opset {opset} → 17" in result.notes
        assert proto.ir_version >= 8
        assert_same_outputs(result, {"x": rand(2, 3, 8, 8, seed=7)})

    @pytest.mark.parametrize("opset", [13, 15, 18, 21])
    def test_kept_where_it_is_enough(self, tmp_path: Path, opset: int) -> None:
        result, _ = prepared(tmp_path, small_cnn(opset=opset, ir_version=10))
        assert opset_of(result.model) == opset
        assert_same_outputs(result, {"x": rand(2, 3, 8, 8, seed=7)})

    CASES = (
        (10, node("Pad", ["x"], ["y"], pads=[0, 0, 1, 1, 0, 0, 1, 1]), {}),
        (10, node("Clip", ["x"], ["y"], min=-0.5, max=0.5), {}),
        (9, node("Slice", ["x"], ["y"], starts=[1], ends=[3], axes=[1]), {}),
        (11, node("Softmax", ["x"], ["y"]), {}),
        (11, node("Softmax", ["x"], ["y"], axis=2), {}),
        (11, node("ReduceSum", ["x"], ["y"], axes=[1]), {}),
        (11, node("Unsqueeze", ["x"], ["y"], axes=[0]), {}),
        (9, node("Upsample", ["x", "s"], ["y"], mode="nearest"), {"s": np.array([1, 1, 2, 2], np.float32)}),
        (10, node("Resize", ["x", "s"], ["y"], mode="nearest"), {"s": np.array([1, 1, 2, 2], np.float32)}),
        (10, node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2]), {}),
        (8, node("Dropout", ["x"], ["y"], ratio=0.5), {}),
        (8, node("LRN", ["x"], ["y"], size=3), {}),
    )

    @pytest.mark.parametrize(("opset", "op", "weights"), CASES, ids=lambda v: getattr(v, "op_type", None))
    def test_operators_that_changed(
        self, tmp_path: Path, opset: int, op: onnx.NodeProto, weights: dict[str, Any]
    ) -> None:
        result, _ = prepared(tmp_path, model([op], {"x": [1, 3, 6, 6]}, weights=weights, opset=opset))
        assert_same_outputs(result, {"x": rand(1, 3, 6, 6, seed=3)})

    def test_branches_are_raised_too(self, tmp_path: Path) -> None:
        def branch(name: str) -> onnx.GraphProto:
            out = helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4])
            return helper.make_graph([node("Unsqueeze", ["x"], [name], axes=[0])], name, [], [out])

        op = node("If", ["c"], ["y"], then_branch=branch("t"), else_branch=branch("e"))
        proto = model([op], {"x": [1, 4]}, weights={"c": np.array(True)}, opset=11)
        result, _ = prepared(tmp_path, proto)
        assert_same_outputs(result, {"x": rand(1, 4)})

    def test_older_than_onnxruntime_runs(self, tmp_path: Path) -> None:
        # onnx's converter would lose the axis here, and the result would have the shape [3, 3, 4, 4].
        op = node("Add", ["x", "b"], ["y"], broadcast=1, axis=1)
        proto = model([op], {"x": [1, 3, 4, 4]}, weights={"b": rand(3)}, opset=6)
        with pytest.raises(ModelError, match=r"opset 6, which ONNX Runtime does not run"):
            prepared(tmp_path, proto)

    def test_refuses_models_that_the_converter_cannot_convert(self, tmp_path: Path) -> None:
        value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "abcd"]
        body = helper.make_graph([node("Add", ["a", "b"], ["c"]), node("Abs", ["c"], ["d"])], "b", value[:2], value[2:])
        op = node("Scan", ["", "s", "x"], ["y", "z"], body=body, num_scan_inputs=1)
        proto = model([op], {"s": [1, 2], "x": [1, 3, 2]}, ["y", "z"], opset=8)
        with pytest.raises(ModelError, match=r"opset 8.*Export the model again with opset 13") as caught:
            prepared(tmp_path, proto)
        assert "/project" not in str(caught.value)


class TestNames:
    def test_unnamed_and_double_names(self, tmp_path: Path) -> None:
        nodes = [
            node("Sigmoid", ["x"], ["a"]),
            node("Tanh", ["a"], ["b"], name="same"),
            node("Sin", ["b"], ["c"], name="same"),
            node("Cos", ["c"], ["y"], name="Sigmoid_0"),
        ]
        result, proto = prepared(tmp_path, model(nodes, {"x": [2, 3]}))
        assert [n.name for n in proto.graph.node] == ["Sigmoid_0_", "same", "same_2", "Sigmoid_0"]
        assert [o for n in proto.graph.node for o in n.output] == ["a", "b", "c", "y"]
        assert any(note.startswith("2 nodes named") for note in result.notes)


class TestCleaning:
    def test_identities_and_dropouts_go(self, tmp_path: Path) -> None:
        nodes = [
            node("Identity", ["x"], ["a"]),
            node("Sigmoid", ["a"], ["b"], name="sigmoid"),
            node("Dropout", ["b"], ["c"]),
            node("Identity", ["c"], ["d"]),
            node("Tanh", ["d"], ["e"], name="tanh"),
            node("Identity", ["e"], ["y"]),
        ]
        result, proto = prepared(tmp_path, model(nodes, {"x": [2, 3]}))
        assert types(proto) == ["Sigmoid", "Tanh"]
        assert [o.name for o in proto.graph.output] == ["y"]
        assert any(note.startswith("4 nodes removed that do nothing") for note in result.notes)
        assert_same_outputs(result, {"x": rand(2, 3)})

    def test_drops_the_origin_of_nodes_and_keeps_model_metadata(self, tmp_path: Path) -> None:
        proto = model([node("Sigmoid", ["x"], ["a"]), node("Tanh", ["a"], ["y"])], {"x": [2, 3]})
        inner = helper.make_tensor_value_info("a", TensorProto.FLOAT, [2, 3])
        proto.graph.value_info.append(inner)
        for part in (proto, proto.graph, *proto.graph.node, proto.graph.value_info[0], proto.graph.input[0]):
            part.metadata_props.add(key="stack_trace", value="File /home/me/secret.py")
            part.doc_string = "of the model" if part is proto else "File /home/me/secret.py"
        _, after = prepared(tmp_path, proto)
        assert after.doc_string == "of the model"
        assert [p.key for p in after.metadata_props] == ["stack_trace"]
        assert [p.key for p in after.graph.input[0].metadata_props] == ["stack_trace"]
        for part in (after.graph, *after.graph.node, *after.graph.value_info):
            assert not part.metadata_props
        for part in (*after.graph.node, *after.graph.value_info):
            assert not part.doc_string

    def test_an_identity_between_two_outputs_stays(self, tmp_path: Path) -> None:
        nodes = [node("Sigmoid", ["x"], ["a"]), node("Identity", ["a"], ["y"])]
        result, proto = prepared(tmp_path, model(nodes, {"x": [2, 3]}, ["a", "y"]))
        assert [o.name for o in proto.graph.output] == ["a", "y"]
        assert_same_outputs(result, {"x": rand(2, 3)})

    def test_a_pad_of_nothing_goes(self, tmp_path: Path) -> None:
        nodes = [node("Abs", ["x"], ["a"]), node("Pad", ["a", "none"], ["b"]), node("Pad", ["b", "one"], ["y"])]
        weights = {"none": np.zeros(4, np.int64), "one": np.array([0, 0, 0, 1])}
        result, proto = prepared(tmp_path, model(nodes, {"x": [2, 3]}, ["y"], weights))
        assert [n.op_type for n in proto.graph.node] == ["Abs", "Pad"]
        assert_same_outputs(result, {"x": rand(2, 3)})

    def test_a_hand_through_of_an_input_stays(self, tmp_path: Path) -> None:
        nodes = [node("Identity", ["x"], ["y"]), node("Abs", ["x"], ["z"])]
        result, _ = prepared(tmp_path, model(nodes, {"x": [2]}, ["y", "z"]))
        assert_same_outputs(result, {"x": rand(2)})

    def test_dead_code_and_constants(self, tmp_path: Path) -> None:
        two = numpy_helper.from_array(np.float32(2))
        nodes = [
            node("Constant", [], ["two"], value=two),
            node("Constant", [], ["three"], value_float=3.0),
            node("Mul", ["two", "three"], ["six"]),
            node("Mul", ["x", "six"], ["y"], name="scale"),
            node("Tanh", ["x"], ["unused"]),
        ]
        result, proto = prepared(tmp_path, model(nodes, {"x": [2]}))
        assert types(proto) == ["Mul"]
        assert "1 node removed that no output depends on" in result.notes
        assert_same_outputs(result, {"x": rand(2)})

    def test_weights_listed_as_inputs_become_constants(self, tmp_path: Path) -> None:
        proto = small_cnn(ir_version=3, opset=8)
        for tensor in proto.graph.initializer:
            proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        result, after = prepared(tmp_path, proto)
        assert [i.name for i in after.graph.input] == ["x"]
        assert "1 BatchNormalization folded" in result.notes
        assert_same_outputs(result, {"x": rand(2, 3, 8, 8)})

    def test_subgraphs_survive(self, tmp_path: Path) -> None:
        def branch(op_type: str) -> onnx.GraphProto:
            out = helper.make_tensor_value_info(f"{op_type}_out", TensorProto.FLOAT, None)
            return helper.make_graph([node(op_type, ["a"], [f"{op_type}_out"])], op_type, [], [out])

        nodes = [
            node("Tanh", ["x"], ["a"]),
            node("ReduceSum", ["a"], ["sum"], keepdims=0),
            node("Less", ["sum", "zero"], ["cond"]),
            node("If", ["cond"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs")),
        ]
        result, proto = prepared(tmp_path, model(nodes, {"x": [2, 3]}, weights={"zero": np.float32(0)}))
        assert "If" in types(proto)
        for sign in (1, -1):
            assert_same_outputs(result, {"x": sign * np.abs(rand(2, 3))})

    def test_local_functions_are_inlined(self, tmp_path: Path) -> None:
        proto = model([node("Twice", ["x"], ["y"], domain="mine", name="call")], {"x": [3]}, domains=["mine"])
        body = [node("Add", ["a", "a"], ["b"])]
        proto.functions.append(helper.make_function("mine", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
        result, after = prepared(tmp_path, proto)
        assert types(after) == ["Add"]
        assert "1 local function inlined" in result.notes
        assert run(result.path, {"x": np.ones(3, np.float32)})[0].tolist() == [2, 2, 2]


class TestHalf:
    @pytest.mark.parametrize("opset", [11, 17])
    def test_computes_in_float32_between_float16_ends(self, tmp_path: Path, opset: int) -> None:
        proto = small_cnn(opset=opset, dtype=TensorProto.FLOAT16)
        for tensor in proto.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        result, after = prepared(tmp_path, proto)
        assert {t.data_type for t in after.graph.initializer} == {TensorProto.FLOAT}
        assert [str(i) for i in result.signature.inputs] == ["x: float16[N, 3, 8, 8]"]
        assert result.signature.outputs[0].dtype == np.float16
        assert "BatchNormalization" not in types(after)
        assert any("widened" in note for note in result.notes)
        half = rand(2, 3, 8, 8).astype(np.float16)
        assert_same_outputs(result, {"x": half}, tolerance=2e-2)

    def test_a_model_that_was_prepared_before_is_prepared_again(self, tmp_path: Path) -> None:
        proto = small_cnn(dtype=TensorProto.FLOAT16)
        for tensor in proto.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        first, _ = prepared(tmp_path, proto)
        again = prepare_model(first.path, tmp_path / "again", simplify=False)
        assert [str(i) for i in again.signature.inputs] == ["x: float16[N, 3, 8, 8]"]
        assert_same_outputs(again, {"x": rand(2, 3, 8, 8).astype(np.float16)}, tolerance=2e-2)

    def test_casts_inside(self, tmp_path: Path) -> None:
        nodes = [
            node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
            node("Mul", ["h", "w"], ["m"]),
            node("Cast", ["m"], ["y"], to=TensorProto.FLOAT),
        ]
        result, after = prepared(tmp_path, model(nodes, {"x": [4]}, weights={"w": np.ones(4, np.float16) * 3}))
        assert types(after) == ["Mul"]
        assert_same_outputs(result, {"x": rand(4)}, tolerance=2e-3)


class TestRefusals:
    def test_quantized_already(self, tmp_path: Path) -> None:
        proto = model(
            [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])],
            {"x": [2]},
            weights={"s": np.float32(1), "z": np.uint8(0)},
        )
        with pytest.raises(ModelError, match="quantized already"):
            prepared(tmp_path, proto)

    def test_a_norm_in_training_mode(self, tmp_path: Path) -> None:
        """Its statistics are those of the batch, so no sample could be judged alone."""
        norm = node("BatchNormalization", ["x", "s", "b", "b", "s"], ["y", "mean", "var"], name="n", training_mode=1)
        given = model([norm], {"x": [2, 4, 8, 8]}, weights={"s": np.ones(4, np.float32), "b": np.zeros(4, np.float32)})
        with pytest.raises(ModelError, match="'n' is a BatchNormalization in training mode"):
            prepared(tmp_path, given)

    def test_custom_operators(self, tmp_path: Path) -> None:
        proto = model([node("Magic", ["x"], ["y"], domain="acme", name="m1")], {"x": [2]}, domains=["acme"])
        with pytest.raises(ModelError, match=r"'m1' is a 'Magic' of the custom domain 'acme'"):
            prepared(tmp_path, proto)

    def test_a_fully_optimised_model(self, tmp_path: Path) -> None:
        x = node("Conv", ["x", "w"], ["y"], domain="com.microsoft.nchwc", name="c_nchwc")
        proto = model([x], {"x": [1, 8, 4, 4]}, weights={"w": rand(8, 8, 3, 3)}, domains=["com.microsoft.nchwc"])
        with pytest.raises(ModelError, match="after its full optimisation") as caught:
            prepared(tmp_path, proto)
        assert "as it was exported" in caught.value.fix

    def test_layers_that_the_optimiser_fused_are_reported(self, tmp_path: Path) -> None:
        fused = node("FusedConv", ["x", "w"], ["y"], domain="com.microsoft", activation="Relu")
        proto = model([fused], {"x": [1, 8, 4, 4]}, weights={"w": rand(8, 8, 3, 3)}, domains=["com.microsoft"])
        result, _ = prepared(tmp_path, proto)
        assert any("FusedConv" in note and "as it was exported" in note for note in result.notes)

    def test_contrib_operators_pass(self, tmp_path: Path) -> None:
        proto = model([node("Gelu", ["x"], ["y"], domain="com.microsoft")], {"x": [2]}, domains=["com.microsoft"])
        result, after = prepared(tmp_path, proto)
        assert {o.domain for o in after.opset_import} == {"", "com.microsoft"}
        assert_same_outputs(result, {"x": rand(2)})

    def test_refuses_models_that_onnxruntime_refuses(self, tmp_path: Path) -> None:
        # This passes the checker, which does not compare types.
        proto = model([node("Add", ["x", "w"], ["y"])], {"x": [2]}, weights={"w": np.ones(2, np.int64)})
        with pytest.raises(ModelError, match=r"m\.onnx: onnxruntime .* refuses it") as caught:
            prepared(tmp_path, proto)
        assert ".prepare." not in str(caught.value)
        assert list((tmp_path / "work").iterdir()) == []

    @pytest.mark.parametrize(
        ("op", "weights"),
        [
            (node("ConstantOfShape", ["s"], ["c"]), {"s": np.array([2**20, 2**20])}),
            (node("Tile", ["a", "s"], ["c"]), {"a": np.ones(4, np.float32), "s": np.array([2**40])}),
            (node("Expand", ["a", "s"], ["c"]), {"a": np.ones(1, np.float32), "s": np.array([2**40])}),
        ],
        ids=lambda v: getattr(v, "op_type", ""),
    )
    def test_huge_tensors_are_refused_before_they_are_made(
        self, tmp_path: Path, op: onnx.NodeProto, weights: dict[str, Any]
    ) -> None:
        proto = model([op, node("Add", ["x", "c"], ["y"])], {"x": [1]}, weights=weights)
        with pytest.raises(ModelError, match="tensor 'c' has the shape"):
            prepared(tmp_path, proto)

    def test_huge_inputs_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="tensor 'x' has the shape"):
            prepared(tmp_path, model([node("Relu", ["x"], ["y"])], {"x": [2**31, 2**31]}))

    def test_functions_that_call_each_other(self, tmp_path: Path) -> None:
        proto = model([node("A", ["x"], ["y"], domain="mine")], {"x": [3]}, domains=["mine"])
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
        for name, other in (("A", "B"), ("B", "A")):
            body = [node(other, ["a"], ["b"], domain="mine")]
            proto.functions.append(helper.make_function("mine", name, ["a"], ["b"], body, imports))
        with pytest.raises(ModelError):
            prepared(tmp_path, proto)

    def test_functions_that_explode(self, tmp_path: Path) -> None:
        proto = model([node("F0", ["x"], ["y"], domain="mine")], {"x": [3]}, domains=["mine"])
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
        for i in range(40):
            callee = {"op_type": f"F{i + 1}", "domain": "mine"} if i < 39 else {"op_type": "Relu", "domain": ""}
            body = [
                helper.make_node(callee["op_type"], ["a"], ["m"], domain=callee["domain"]),
                helper.make_node(callee["op_type"], ["m"], ["b"], domain=callee["domain"]),
            ]
            proto.functions.append(helper.make_function("mine", f"F{i}", ["a"], ["b"], body, imports))
        with pytest.raises(ModelError, match="more than 1000000 nodes"):
            prepared(tmp_path, proto)


class TestLarge:
    def test_external_data_on_every_path(self, tmp_path: Path) -> None:
        proto = small_cnn(opset=11)
        for tensor in proto.graph.initializer:
            if tensor.name == "w":
                tensor.CopyFrom(numpy_helper.from_array(rand(8, 3, 7, 7), "w"))
        source = tmp_path / "big.onnx"
        onnx.save(proto, source, save_as_external_data=True, location="big.bin", size_threshold=64)
        result = prepare_model(source, tmp_path / "work", inline_limit=256)
        assert [f.name for f in model_files(result.path)] == ["prepared.onnx", "prepared.onnx.data"]
        assert any("external data" in note for note in result.notes)
        small = prepare_model(source, tmp_path / "small")
        assert [f.name for f in model_files(small.path)] == ["prepared.onnx"]
        feeds = {"x": rand(2, 3, 8, 8, seed=5)}
        assert_same_outputs(result, feeds)
        assert np.array_equal(run(result.path, feeds)[0], run(small.path, feeds)[0])
        again = prepare_model(source, tmp_path / "again", inline_limit=256)
        assert again.digest == result.digest

    @pytest.mark.slow
    def test_more_than_two_gib(self, tmp_path: Path) -> None:
        size = 23200  # float32 [23200, 23200] has just over 2.0 GiB
        data = tmp_path / "zeros.bin"
        with data.open("wb") as file:
            file.truncate(size * size * 4)  # sparse: uses no space
        # ONNX Runtime copies the weight of a product into another layout, which takes a minute. A table has its layout.
        nodes = [
            node("Cast", ["x"], ["i"], to=TensorProto.INT64),
            node("Gather", ["w", "i"], ["m"], name="table"),
            node("Slice", ["m", "start", "end", "axis"], ["n"], name="head"),
            node("BatchNormalization", ["n", "one", "zero", "zero", "one"], ["y"], name="bn"),
        ]
        four = {"one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)}
        span = {"start": np.array([0]), "end": np.array([4]), "axis": np.array([1])}
        proto = model(nodes, {"x": [1]}, weights={**four, **span}, opset=11)
        weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[size, size])
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="zeros.bin")
        proto.graph.initializer.append(weight)
        result = prepare_model(write(tmp_path / "huge.onnx", proto), tmp_path / "work")
        assert opset_of(result.model) == 17
        assert [f.name for f in model_files(result.path)] == ["prepared.onnx", "prepared.onnx.data"]
        assert (tmp_path / "work" / "prepared.onnx.data").stat().st_size > 2**31
        assert run(result.path, {"x": np.ones(1, np.float32)})[0].tolist() == [[0, 0, 0, 0]]


def test_unknown_shapes_are_reported(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "s"], ["r"]), node("Tanh", ["r"], ["y"])]
    proto = model(nodes, {"x": [2, 3]})
    proto.graph.input.append(helper.make_tensor_value_info("s", TensorProto.INT64, ["rank"]))
    result, _ = prepared(tmp_path, proto)
    assert any("of unknown shape: r, y" in note for note in result.notes)


def test_symbolic_sizes_are_followed(tmp_path: Path) -> None:
    _, proto = prepared(tmp_path, small_cnn())
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.value_info
    }
    assert shapes["bn_out"] == ["N", 8, 8, 8]
    assert shapes["flat_out"] == ["N", 8]
