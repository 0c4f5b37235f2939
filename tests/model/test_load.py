from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from edgeq.errors import ModelError, OutputError
from edgeq.model import load
from edgeq.model.convert import from_proto
from edgeq.model.digests import model_digest
from edgeq.model.files import model_files
from edgeq.model.inspect import inspect_model
from edgeq.model.load import is_quantized, load_model, model_signature, read_model, save_model
from edgeq.model.prepare import prepare_model
from edgeq.model.sessions import open_in_memory
from edgeq.scheme import Scheme
from tests.graphs import proto

from .build import model, node, rand, run, small_cnn, write


def external(folder: Path, *, location: str = "weights.bin", offset: str = "0", length: str | None = None) -> Path:
    """Write a MatMul whose 4 x 4 weight has its data in `location`."""
    proto = model([node("MatMul", ["x", "w"], ["y"])], {"x": [1, 4]})
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset}
    if length is not None:
        entries["length"] = length
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    proto.graph.initializer.append(weight)
    return write(folder / "m.onnx", proto)


def archive(name: str) -> bytes:
    """Return a zip with one empty file."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        written.writestr(name, b"")
    return stream.getvalue()


class TestNotAModel:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "is empty"),
            (b"hello, this is not a model\n", "a text file"),
            (b"<!DOCTYPE html><html>404</html>", "error page"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
            (b"PK\x03\x04" + bytes(40), "PyTorch checkpoint"),
            (archive("manifest.json"), "is a bundle, not a model. Give the .onnx file it was made from"),
            (archive("x/manifest.json"), "PyTorch checkpoint"),
            (b"\x80\x02}q\x00.", "pickle"),
            (b"\x1c\x00\x00\x00TFL3" + bytes(40), "TensorFlow Lite"),
            (b"\x93NUMPY\x01\x00", "NumPy"),
            (bytes(range(256)) * 10, "damaged or truncated"),
        ],
    )
    def test_says_what_it_is(self, tmp_path: Path, content: bytes, expected: str) -> None:
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            load_model(path)
        assert str(path) in str(caught.value)
        assert expected in str(caught.value)
        assert caught.value.fix

    def test_missing_directory_and_special_files(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            load_model(tmp_path / "no.onnx")
        with pytest.raises(ModelError, match="is a directory"):
            load_model(tmp_path)
        fifo = tmp_path / "pipe.onnx"
        os.mkfifo(fifo)
        with pytest.raises(ModelError, match="not a regular file"):
            load_model(fifo)

    def test_too_large_for_a_protobuf(self, tmp_path: Path) -> None:
        path = tmp_path / "big.onnx"
        with path.open("wb") as file:
            file.truncate(2**31)  # sparse: uses no space
        with pytest.raises(ModelError, match="external data"):
            load_model(path)

    @pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
    def test_truncated(self, tmp_path: Path, kept: float) -> None:
        whole = small_cnn().SerializeToString()
        path = tmp_path / "m.onnx"
        path.write_bytes(whole[: int(len(whole) * kept)])
        with pytest.raises(ModelError, match=r"m\.onnx"):
            load_model(path)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_no_damage_escapes_as_another_error(self, tmp_path: Path, data: st.DataObject) -> None:
        content = bytearray(small_cnn().SerializeToString())
        for _ in range(data.draw(st.integers(1, 8))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path / "m.onnx"
        path.write_bytes(bytes(content))
        with contextlib.suppress(ModelError):
            load_model(path)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(content=st.binary(min_size=1, max_size=300))
    def test_random_bytes_are_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelError):
            load_model(path)

    def test_newer_opset_than_onnx_knows(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.onnx", small_cnn(opset=onnx.defs.onnx_opset_version() + 1))
        with pytest.raises(ModelError, match="newer onnx"):
            load_model(path)


class TestGraph:
    def test_cycle_is_named(self, tmp_path: Path) -> None:
        nodes = [
            node("Add", ["x", "c"], ["a"], name="first"),
            node("Relu", ["a"], ["b"], name="second"),
            node("Relu", ["b"], ["c"], name="third"),
            node("Relu", ["c"], ["y"], name="victim"),
        ]
        with pytest.raises(ModelError, match="cycle") as caught:
            load_model(write(tmp_path / "m.onnx", model(nodes, {"x": [1]})))
        assert "victim" not in str(caught.value)

    def test_unsorted_nodes_are_sorted(self, tmp_path: Path) -> None:
        nodes = [node("Relu", ["a"], ["y"], name="last"), node("Neg", ["x"], ["a"], name="first")]
        loaded = load_model(write(tmp_path / "m.onnx", model(nodes, {"x": [1]})))
        assert [n.name for n in loaded.graph.node] == ["first", "last"]

    def test_unsorted_use_from_inside_a_branch(self, tmp_path: Path) -> None:
        then = helper.make_graph(
            [node("Neg", ["late"], ["t"])], "then", [], [helper.make_tensor_value_info("t", TensorProto.FLOAT, [1])]
        )
        other = helper.make_graph(
            [node("Neg", ["x"], ["e"])], "else", [], [helper.make_tensor_value_info("e", TensorProto.FLOAT, [1])]
        )
        nodes = [
            node("If", ["cond"], ["y"], name="if", then_branch=then, else_branch=other),
            node("Abs", ["x"], ["late"], name="abs"),
        ]
        loaded = load_model(write(tmp_path / "m.onnx", model(nodes, {"x": [1]}, weights={"cond": np.array(True)})))
        assert [n.name for n in loaded.graph.node] == ["abs", "if"]

    @pytest.mark.parametrize(
        ("nodes", "expected"),
        [
            ([node("Relu", ["nowhere"], ["y"])], "nowhere"),
            ([node("NoSuchOperator", ["x"], ["y"])], "NoSuchOperator"),
            ([node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])], "y"),
        ],
    )
    def test_invalid_graphs_are_refused(self, tmp_path: Path, nodes: list[onnx.NodeProto], expected: str) -> None:
        with pytest.raises(ModelError, match=expected):
            load_model(write(tmp_path / "m.onnx", model(nodes, {"x": [1]})))

    def test_no_operators(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no operators"):
            load_model(write(tmp_path / "m.onnx", model([], {"x": [1]}, ["x"])))


class TestConstants:
    """Test that a Constant node has one value. If it has several, the first one counts, as in ONNX Runtime."""

    @staticmethod
    def graph(*attributes: onnx.AttributeProto, output: int = TensorProto.FLOAT) -> onnx.ModelProto:
        proto = model([node("Constant", [], ["c"]), node("Relu", ["x"], ["y"])], {"x": [1]})
        proto.graph.node[0].attribute.extend(attributes)
        proto.graph.output.append(helper.make_tensor_value_info("c", output, None))
        return proto

    def test_the_first_of_two_values_counts(self, tmp_path: Path) -> None:
        values = (helper.make_attribute("value_float", 3.0), helper.make_attribute("value_int", 4))
        path = write(tmp_path / "m.onnx", self.graph(*values))
        (expected,) = onnxruntime.InferenceSession(path).run(["c"], {"x": rand(1)})
        assert expected == 3
        (constant, _) = load_model(path).graph.node
        assert [attribute.name for attribute in constant.attribute] == ["value_float"]
        assert inspect_model(path).parameters == 1

    def test_none_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="Constant 'c' has no value"):
            load_model(write(tmp_path / "m.onnx", self.graph()))

    @pytest.mark.parametrize(("name", "value"), [("value_string", "\u202eé"), ("value_strings", ["\u202eé", "b"])])
    def test_texts_need_not_be_ascii(self, tmp_path: Path, name: str, value: str | list[str]) -> None:
        attribute = helper.make_attribute(name, value)
        path = write(tmp_path / "m.onnx", self.graph(attribute, output=TensorProto.STRING))
        (expected,) = onnxruntime.InferenceSession(path).run(["c"], {"x": rand(1)})
        assert inspect_model(path, [("auto", "cpu", Scheme())]).targets
        prepared = prepare_model(path, tmp_path / "work")
        (found,) = onnxruntime.InferenceSession(prepared.path).run(["c"], {"x": rand(1)})
        assert found.tolist() == expected.tolist() == value


class TestTensors:
    @pytest.mark.parametrize("dims", [[2**40], [2**31, 2**31], [4, 5], [-1], [0]])
    def test_dims_that_the_data_does_not_have(self, tmp_path: Path, dims: list[int]) -> None:
        proto = small_cnn()
        del proto.graph.initializer[0].dims[:]
        proto.graph.initializer[0].dims.extend(dims)
        with pytest.raises(ModelError, match="'w'"):
            load_model(write(tmp_path / "m.onnx", proto))

    def test_typed_fields_and_nested_constants_are_counted(self, tmp_path: Path) -> None:
        good = helper.make_tensor("c", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
        proto = model([node("Constant", [], ["c"], value=good), node("Add", ["x", "c"], ["y"])], {"x": [3]})
        load_model(write(tmp_path / "good.onnx", proto))
        proto.graph.node[0].attribute[0].t.dims[0] = 1000
        with pytest.raises(ModelError, match="needs 1000 values and has 3"):
            load_model(write(tmp_path / "bad.onnx", proto))

    @pytest.mark.parametrize(
        "dtype", [TensorProto.INT4, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.COMPLEX64, TensorProto.BOOL]
    )
    @pytest.mark.parametrize("raw", [True, False])
    def test_every_storage_is_measured_right(self, tmp_path: Path, dtype: int, raw: bool) -> None:
        numbers = np.ones(5, dtype=helper.tensor_dtype_to_np_dtype(dtype))
        tensor = numpy_helper.from_array(numbers, "c") if raw else helper.make_tensor("c", dtype, [5], numbers)
        proto = model([node("Relu", ["x"], ["y"])], {"x": [1]}, opset=21, ir_version=10)
        proto.graph.initializer.append(tensor)
        load_model(write(tmp_path / "m.onnx", proto))

    def test_unknown_data_type(self, tmp_path: Path) -> None:
        proto = small_cnn()
        proto.graph.initializer[0].data_type = 99
        with pytest.raises(ModelError, match="unknown data type 99"):
            load_model(write(tmp_path / "m.onnx", proto))

    def test_sparse_tensor_that_would_be_huge(self, tmp_path: Path) -> None:
        proto = small_cnn()
        sparse = proto.graph.sparse_initializer.add(dims=[10**6, 10**6])
        sparse.values.CopyFrom(helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0]))
        sparse.indices.CopyFrom(helper.make_tensor("si", TensorProto.INT64, [1], [0]))
        with pytest.raises(ModelError, match="sparse tensor 's'"):
            load_model(write(tmp_path / "m.onnx", proto))


class TestExternalData:
    def test_tensors_that_share_one_file_are_counted_once_each(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EDGEQ_BUDGET", "sample=1KiB")
        (tmp_path / "weights.bin").write_bytes(bytes(64))
        path = external(tmp_path)
        proto = onnx.load(path, load_external_data=False)
        for number in range(100):
            proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
            proto.graph.initializer[-1].name = f"w{number}"
        write(path, proto)
        with pytest.raises(ModelError, match="external tensors have 6464 bytes, but their files only 64"):
            load_model(path, external_data="none")

    def test_good(self, tmp_path: Path) -> None:
        (tmp_path / "weights.bin").write_bytes(rand(4, 4).tobytes())
        path = external(tmp_path)
        loaded = load_model(path)
        assert numpy_helper.to_array(loaded.graph.initializer[0]).tolist() == rand(4, 4).tolist()
        kept = load_model(path, external_data="none")
        assert kept.graph.initializer[0].data_location == TensorProto.EXTERNAL
        assert model_files(path) == (path, tmp_path / "weights.bin")

    def test_subfolder_is_inside(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "w.bin").write_bytes(bytes(64))
        assert len(model_files(external(tmp_path, location="data/w.bin"))) == 2

    @pytest.mark.parametrize(
        "location",
        [
            "../weights.bin",
            "a/../../weights.bin",
            "..\\weights.bin",
            "/etc/passwd",
            "C:\\weights.bin",
            "\\\\server\\share",
            "",
            ".",
            "weights.bin\0.txt",
        ],
    )
    def test_escapes_are_refused(self, tmp_path: Path, location: str) -> None:
        (tmp_path / "weights.bin").write_bytes(bytes(64))
        (tmp_path / "in").mkdir()
        with pytest.raises(ModelError, match="external tensor 'w'"):
            load_model(external(tmp_path / "in", location=location))

    def test_symbolic_links_out_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "secret.bin").write_bytes(bytes(64))
        inside = tmp_path / "in"
        inside.mkdir()
        (inside / "weights.bin").symlink_to(tmp_path / "secret.bin")
        with pytest.raises(ModelError, match="symbolic link"):
            load_model(external(inside))
        (inside / "folder").symlink_to(tmp_path)
        with pytest.raises(ModelError, match="symbolic link"):
            load_model(external(inside, location="folder/secret.bin"))

    @pytest.mark.parametrize("data", ["blobs/w", "blobs/below/w", "snapshot/w", "elsewhere/w", "blobs"])
    def test_a_model_that_is_a_link_may_have_its_data_where_it_leads(self, tmp_path: Path, data: str) -> None:
        """The data of a linked model may be below the link's folder or the file's folder, as in a cache of downloads.

        ONNX Runtime allows the same.
        """
        for folder in ("blobs/below", "snapshot", "elsewhere"):
            (tmp_path / folder).mkdir(parents=True)
        external(tmp_path / "blobs").rename(tmp_path / "blobs" / "1f2e")
        path = tmp_path / "snapshot" / "m.onnx"
        path.symlink_to("../blobs/1f2e")
        weights = path.with_name("weights.bin")
        weights.symlink_to(f"../{data}")
        if data != "blobs":
            (tmp_path / data).write_bytes(rand(4, 4).tobytes())
        if data in ("elsewhere/w", "blobs"):
            with pytest.raises(ModelError, match=r"symbolic link|not a regular file"):
                load_model(path)
            with pytest.raises(Exception, match=r"weights\.bin"):
                onnxruntime.InferenceSession(path)
            return
        onnxruntime.InferenceSession(path)
        loaded = read_model(path)
        assert loaded.graph.initializers["w"].const_value.numpy().tolist() == rand(4, 4).tolist()
        assert model_files(path) == (path, weights)
        assert model_digest(path, path.parent) == model_digest(path)
        feed = {"x": rand(1, 4)}
        (expected,) = onnxruntime.InferenceSession(path).run(None, feed)
        prepared = prepare_model(path, tmp_path / "work")
        for session in (open_in_memory(loaded), onnxruntime.InferenceSession(prepared.path)):
            np.testing.assert_array_equal(session.run(None, feed)[0], expected)

    def test_a_link_to_a_model_opens_no_folder_above(self, tmp_path: Path) -> None:
        for folder in ("blobs", "snapshot"):
            (tmp_path / folder).mkdir()
        (tmp_path / "secret.bin").write_bytes(bytes(64))
        path = tmp_path / "snapshot" / "linked.onnx"
        for location in ("../secret.bin", "../blobs/../secret.bin", str(tmp_path / "secret.bin")):
            path.unlink(missing_ok=True)
            path.symlink_to(external(tmp_path / "blobs", location=location))
            with pytest.raises(ModelError, match=r"leaves the model's folder|absolute location"):
                load_model(path)

    def test_symbolic_link_loop(self, tmp_path: Path) -> None:
        (tmp_path / "weights.bin").symlink_to(tmp_path / "weights.bin")
        with pytest.raises(ModelError, match="cannot be read"):
            load_model(external(tmp_path))

    def test_device_files_are_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "weights.bin")
        with pytest.raises(ModelError, match="not a regular file"):
            load_model(external(tmp_path))

    def test_reads_data_with_several_hard_links(self, tmp_path: Path) -> None:
        """Stores such as those of DVC, Nix and Bazel link their files into the working folder."""
        (tmp_path / "store").write_bytes(rand(4, 4).tobytes())
        (tmp_path / "weights.bin").hardlink_to(tmp_path / "store")
        loaded = read_model(external(tmp_path)).graph.initializers["w"].const_value
        assert loaded.numpy().tolist() == rand(4, 4).tolist()
        assert loaded.tobytes() == rand(4, 4).tobytes()
        save_model(read_model(tmp_path / "m.onnx"), tmp_path / "copy.onnx", inline_limit=8)
        assert read_model(tmp_path / "copy.onnx").graph.initializers["w"].const_value.tobytes() == rand(4, 4).tobytes()

    @pytest.mark.parametrize("kind", ["link", "pipe"])
    def test_refuses_data_that_was_replaced_after_the_check(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "in").mkdir()
        data = tmp_path / "in" / "weights.bin"
        for file in (data, tmp_path / "secret.bin"):
            file.write_bytes(bytes(64))
        loaded = read_model(external(tmp_path / "in")).graph.initializers["w"].const_value
        data.unlink()
        data.symlink_to(tmp_path / "secret.bin") if kind == "link" else os.mkfifo(data)
        with pytest.raises(ModelError, match=r"is not in|it is a pipe"):
            loaded.numpy()

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="next to the model"):
            load_model(external(tmp_path))

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            ("4", None, "which has 64"),
            ("0", "1000000000000", "type need 64"),
            ("99999999999999999999", None, "offset"),
            ("-1", None, "offset"),
            ("x", None, "offset"),
            ("0", "-64", "length"),
            ("0", "4", "type need 64"),
        ],
    )
    def test_span_outside_the_file(self, tmp_path: Path, offset: str, length: str | None, expected: str) -> None:
        (tmp_path / "weights.bin").write_bytes(bytes(64))
        with pytest.raises(ModelError, match=expected):
            load_model(external(tmp_path, offset=offset, length=length))

    def test_large_data_is_left_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "weights.bin").write_bytes(bytes(64))
        monkeypatch.setattr(load, "SMALL_EXTERNAL", 63)
        path = external(tmp_path)
        assert load_model(path).graph.initializer[0].data_location == TensorProto.EXTERNAL
        assert load_model(path, external_data="all").graph.initializer[0].raw_data == bytes(64)


class TestDigest:
    def test_is_the_files_own_without_external_data(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.onnx", small_cnn())
        assert model_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()

    def test_covers_external_data(self, tmp_path: Path) -> None:
        data = tmp_path / "weights.bin"
        data.write_bytes(bytes(64))
        path = external(tmp_path)
        before = model_digest(path)
        data.write_bytes(bytes(63) + b"\x01")
        assert model_digest(path) != before


class TestSignature:
    def test_initializers_are_not_inputs(self, tmp_path: Path) -> None:
        proto = small_cnn(ir_version=3)
        for tensor in proto.graph.initializer:
            proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        signature = model_signature(write(tmp_path / "m.onnx", proto))
        assert [str(i) for i in signature.inputs] == ["x: float32[N, 3, 8, 8]"]
        assert [str(o) for o in signature.outputs] == ["y: float32[?]"]

    def test_free_sizes(self, tmp_path: Path) -> None:
        proto = model([node("Relu", ["x"], ["y"])], {"x": ["N", None, 0, -1, 7]})
        assert model_signature(write(tmp_path / "m.onnx", proto)).inputs[0].shape == ("N", None, None, None, 7)

    @pytest.mark.parametrize("name", ["?", "-1", " ", "None", "unknown", "unk__12", "*"])
    def test_placeholders_are_no_symbols(self, tmp_path: Path, name: str) -> None:
        proto = model([node("Relu", ["x"], ["y"])], {"x": [name, 3, name, "height"]})
        path = write(tmp_path / "m.onnx", proto)
        assert model_signature(path).inputs[0].shape == (None, 3, None, "height")
        dims = load_model(path).graph.input[0].type.tensor_type.shape.dim
        assert [d.WhichOneof("value") for d in dims] == [None, "dim_value", None, "dim_param"]

    def test_unknown_type(self, tmp_path: Path) -> None:
        proto = small_cnn()
        proto.graph.input[0].type.tensor_type.elem_type = 75
        with pytest.raises(ModelError, match="'x' has the unknown data type 75"):
            model_signature(write(tmp_path / "m.onnx", proto))

    def test_sequence_inputs_are_refused(self, tmp_path: Path) -> None:
        proto = model([node("SequenceAt", ["s", "i"], ["y"])], {}, weights={"i": np.array(0)})
        proto.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
        with pytest.raises(ModelError, match="'s' is a sequence"):
            model_signature(write(tmp_path / "m.onnx", proto))


class TestSave:
    def test_one_file_below_the_limit(self, tmp_path: Path) -> None:
        save_model(from_proto(small_cnn()), tmp_path / "m.onnx")
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]

    def test_external_data_above_it_and_the_same_bytes_each_time(self, tmp_path: Path) -> None:
        proto = small_cnn()
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(rand(64, 3, 3, 3), "w"))
        for name in ("scale", "shift", "mean", "var"):
            index = next(i for i, t in enumerate(proto.graph.initializer) if t.name == name)
            proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(np.abs(rand(64)) + 0.1, name))
        index = next(i for i, t in enumerate(proto.graph.initializer) if t.name == "fc")
        proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(rand(64, 5), "fc"))
        whole = write(tmp_path / "whole.onnx", proto)
        digests = []
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            path = tmp_path / folder / "m.onnx"
            save_model(from_proto(proto), path, inline_limit=1000)
            assert [f.name for f in model_files(path)] == ["m.onnx", "m.onnx.data"]
            digests.append(model_digest(path))
        assert digests[0] == digests[1]
        feeds = {"x": rand(2, 3, 8, 8, seed=9)}
        assert np.array_equal(run(whole, feeds)[0], run(tmp_path / "a" / "m.onnx", feeds)[0])

    def test_references_need_a_folder_and_are_carried(self, tmp_path: Path) -> None:
        (tmp_path / "weights.bin").write_bytes(rand(4, 4).tobytes())
        proto = load_model(external(tmp_path), external_data="none")
        with pytest.raises(OutputError, match="unknown folder"):
            save_model(from_proto(proto), tmp_path / "copy.onnx")
        referring = from_proto(proto, tmp_path)
        save_model(referring, tmp_path / "copy.onnx")
        kept = [value.const_value for value in referring.graph.initializers.values()]
        assert [isinstance(tensor, ir.ExternalTensor) for tensor in kept] == [True], (
            "the model that was given is left as it was"
        )
        assert model_files(tmp_path / "copy.onnx") == (tmp_path / "copy.onnx",)
        assert np.array_equal(run(tmp_path / "copy.onnx", {"x": np.eye(4)[:1].astype(np.float32)})[0][0], rand(4, 4)[0])


@pytest.mark.parametrize(
    ("op_type", "expected"), [("QuantizeLinear", True), ("QLinearAdd", True), ("ConvInteger", True), ("Conv", False)]
)
def test_quantized_models_are_recognised(op_type: str, expected: bool) -> None:
    assert is_quantized(from_proto(model([node(op_type, ["x"], ["y"])], {"x": [1]}))) is expected


def test_an_attribute_that_refers_to_no_function_is_refused_in_one_line(tmp_path: Path) -> None:
    made = proto("g (float[2] x) => (float[2] y) { c = Constant <value = float[2] {1, 2}> () y = Add (x, c) }")
    made.graph.node[0].attribute[0].ClearField("t")
    made.graph.node[0].attribute[0].ref_attr_name = "outer"
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    with pytest.raises(ModelError):
        prepare_model(path, tmp_path / "work")
