"""A bundle's models read their weights only from the bundle's own files, whatever onnxruntime would do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from edgeq_device.bundle.package import open_bundle
from edgeq_device.engines.sessions import _gather_files
from edgeq_device.engines.variant import EXTERNAL_FOLDER
from edgeq_device.errors import BundleError
from onnx import TensorProto, helper

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import group

from .attacks.directories import edit, seal
from .samples import SIZE, WEIGHTS, linear, variant

COMPONENT = "models/model/component.json"
MODEL = "models/model/v/model.onnx"
BYTES = WEIGHTS.nbytes
Change = Callable[[TensorProto], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bundle of one variant with its weights in a file next to its model. Tests must not change it."""
    folder = tmp_path_factory.mktemp("external")
    model = linear(folder / "m" / "m.onnx", 0.0, external="weights.bin")
    write_bundle(BundleSpec("x", (variant("v", model, 0.0),)), folder / "b")
    return folder / "b"


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "b")
    # The file that the hostile locations below name exists and has the right size, so only the check can refuse it.
    (tmp_path / "secret").write_bytes(WEIGHTS.tobytes())
    return tmp_path / "b"


def refused(bundle: Path, says: str) -> None:
    """Check that edgeq and the bundle's own runner refuse it in one line, with exit code 7, before they import
    onnxruntime.
    """
    done = CliRunner().invoke(group, ["verify", str(bundle)])
    assert done.exit_code == 7, (done.output, done.exception)
    code = f"import sys; sys.argv[0] = {str(bundle / 'edgeq_run.py')!r}; import runpy\n"
    code += "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally:\n    assert 'onnxruntime' not in sys.modules"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    run = subprocess.run(
        [sys.executable, "-c", code, "verify"], cwd=bundle, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 7, run.stderr
    for err in (done.stderr, run.stderr):
        assert says in err
        assert len(err.splitlines()) == 1


def rewrite(bundle: Path, change: Change, *, inline: bool = False) -> None:
    """Change the model's tensor with external data, or with `inline` the one without, and seal the bundle again."""
    model = onnx.load(bundle / MODEL, load_external_data=False)
    change(next(t for t in model.graph.initializer if (t.data_location == TensorProto.EXTERNAL) != inline))
    (bundle / MODEL).write_bytes(model.SerializeToString())
    seal(bundle)


def entry(key: str, value: str) -> Change:
    def change(tensor: TensorProto) -> None:
        kept = {e.key: e.value for e in tensor.external_data}
        del tensor.external_data[:]
        for name, text in {**kept, key: value}.items():
            tensor.external_data.add(key=name, value=text)

    return change


def attribute(name: str, value: object) -> Change:
    def change(tensor: TensorProto) -> None:
        if isinstance(value, list):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)

    return change


def twice(tensor: TensorProto) -> None:
    tensor.external_data.add(key="location", value="../../../../secret")


LOCATIONS = {
    "parent": ("../../../../secret", "is not a plain path"),
    "inner parent": ("a/../weights.bin", "is not a plain path"),
    "current": ("./weights.bin", "is not a plain path"),
    "absolute": ("/etc/passwd", "is absolute"),
    "backslash": ("..\\..\\secret", "a character that is not allowed"),
    "drive": ("C:/secret", "a character that is not allowed"),
    "UNC": ("\\\\server\\share", "a character that is not allowed"),
    "UNC with slashes": ("//server/share", "is absolute"),
    "NUL": ("weights.bin\0", "a character that is not allowed"),
    "newline": ("weights\n.bin", "a character that is not allowed"),
    "empty": ("", "is empty"),
    "folder": ("..", "is not a plain path"),
    "address": ("*/_ORT_MEM_ADDR_/*", "an address in memory"),
    "little-endian address": ("*/_ORT_MEM_LE_ADDR_/*", "an address in memory"),
    "address without stars": ("_ORT_MEM_ADDR_", "an address in memory"),
    "not in the bundle": ("other.bin", "is not in the bundle"),
    "the manifest": ("manifest.json", "is not in the bundle"),
    "very long": ("w" * 4000, "longer than 512 characters"),
}
ENTRIES: dict[str, tuple[Change, str]] = {
    **{name: (entry("location", location), says) for name, (location, says) in LOCATIONS.items()},
    "location twice": (twice, "gives the 'location' of its external data twice"),
    "negative offset": (entry("offset", "-4"), "has the offset '-4'"),
    "offset in another writing": (entry("offset", "0x10"), "has the offset '0x10'"),
    "offset with a space": (entry("offset", " 0"), "has the offset ' 0'"),
    "offset of other digits": (entry("offset", "٣"), "has the offset"),
    "offset of many digits": (entry("offset", "9" * 5000), "a text of 5000 bytes"),
    "offset beyond 64 bits": (entry("offset", str(1 << 64)), "has the offset"),
    "offset beyond the file": (entry("offset", "4"), f"which has {BYTES}"),
    "length beyond the file": (entry("length", str(BYTES + 4)), f"has {BYTES + 4} bytes, but"),
    "length of nothing": (entry("length", "0"), "has 0 bytes, but"),
    "length less than the shape": (entry("length", str(BYTES - 4)), f"has {BYTES - 4} bytes, but"),
    "empty length": (entry("length", ""), "has the length ''"),
    "unknown key": (entry("prepacked_0", "x"), "has the unknown key 'prepacked_0' in its external data"),
    "huge shape": (attribute("dims", [1 << 62, 1 << 62]), "bytes, but its shape and type need"),
    "negative shape": (attribute("dims", [-1, SIZE]), "or a negative one"),
    "strings": (attribute("data_type", TensorProto.STRING), "data type 8, which cannot be external"),
    "no type": (attribute("data_type", 0), "data type 0, which cannot be external"),
    "unknown type": (attribute("data_type", 99), "data type 99, which cannot be external"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_external_data_are_refused(name: str, bundle: Path) -> None:
    change, says = ENTRIES[name]
    rewrite(bundle, change)
    refused(bundle, says)


def test_an_existing_absolute_path_is_refused(bundle: Path, tmp_path: Path) -> None:
    rewrite(bundle, entry("location", str(tmp_path / "secret")))
    refused(bundle, "is absolute")


def test_entries_without_the_location_flag_are_refused(bundle: Path) -> None:
    rewrite(bundle, entry("location", "../../../../secret"), inline=True)
    refused(bundle, "is not a plain path")


def test_a_link_is_no_file_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    data = next((bundle / MODEL).parent.glob("*.bin"))
    data.unlink()
    data.symlink_to(tmp_path / "secret")
    refused(bundle, "is a link")


def in_subgraph(tensor: TensorProto) -> onnx.NodeProto:
    inner = helper.make_graph([], "inner", [], [], [tensor])
    return helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner)


def in_sparse(tensor: TensorProto) -> onnx.NodeProto:
    values = onnx.SparseTensorProto(values=tensor, indices=tensor, dims=[4])
    return helper.make_node("Constant", [], ["z"], sparse_value=values)


PLACES: dict[str, Callable[[onnx.ModelProto, TensorProto], object]] = {
    "subgraph": lambda m, t: m.graph.node.append(in_subgraph(t)),
    "attribute": lambda m, t: m.graph.node.append(helper.make_node("Constant", [], ["z"], value=t)),
    "sparse attribute": lambda m, t: m.graph.node.append(in_sparse(t)),
    "sparse initializer": lambda m, t: m.graph.sparse_initializer.add(values=t, indices=t, dims=[4]),
    "function": lambda m, t: m.functions.add(name="F", node=[in_subgraph(t)]),
    "training": lambda m, t: m.training_info.add(algorithm=helper.make_graph([], "a", [], [], [t])),
}


@pytest.mark.parametrize("place", PLACES)
def test_external_data_are_refused_wherever_they_stand(place: str, bundle: Path) -> None:
    model = onnx.load(bundle / MODEL, load_external_data=False)
    hidden = TensorProto(name="hidden", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    hidden.external_data.add(key="location", value="../../../../secret")
    PLACES[place](model, hidden)
    (bundle / MODEL).write_bytes(model.SerializeToString())
    seal(bundle)
    refused(bundle, "external tensor 'hidden': file name '../../../../secret'")


def renamed(bundle: Path, name: str) -> None:
    (bundle / MODEL).rename((bundle / MODEL).with_name(name))
    edit(bundle, COMPONENT, lambda c: c["variants"]["v"]["executor_info"]["ort"].update(model_file=name))
    seal(bundle)


@pytest.mark.parametrize("name", ["model.ort", "model.onnx.ort", "model", "model.ONNX"])
def test_models_are_onnx_by_their_name(name: str, bundle: Path) -> None:
    renamed(bundle, name)
    refused(bundle, "does not have the suffix .onnx")


def test_models_are_onnx_by_their_bytes(bundle: Path) -> None:
    (bundle / MODEL).write_bytes(b"\x20\x00\x00\x00ORTM" + bytes(100))
    seal(bundle)
    refused(bundle, "is in ONNX Runtime's own format")


@pytest.mark.parametrize(("data", "says"), [(b"", "is empty"), (b"nonsense", "is not a valid ONNX file")])
def test_a_model_that_is_none_is_refused(data: bytes, says: str, bundle: Path) -> None:
    (bundle / MODEL).write_bytes(data)
    seal(bundle)
    refused(bundle, says)


def test_compiled_code_is_refused(bundle: Path) -> None:
    model = onnx.load(bundle / MODEL, load_external_data=False)
    model.graph.node.add(op_type="EPContext", domain="com.microsoft", output=["z"])
    (bundle / MODEL).write_bytes(model.SerializeToString())
    seal(bundle)
    refused(bundle, "contains code compiled for one device")


@pytest.fixture
def sharing(tmp_path: Path) -> Path:
    """Write a bundle of two models that share one folder of weights through a session option."""
    models = [linear(tmp_path / name / "m.onnx", bias, external="w.bin") for name, bias in (("a", 0.0), ("b", 1.0))]
    spec = BundleSpec("x", tuple(variant(m.parent.name, m, bias) for m, bias in zip(models, (0.0, 1.0), strict=True)))
    write_bundle(spec, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_shared_weights_are_looked_for_where_the_option_says(sharing: Path) -> None:
    with open_bundle(sharing) as opened:
        assert all(EXTERNAL_FOLDER in v.session_options for v in opened.components["model"])
    edit(
        sharing, COMPONENT, lambda c: c["variants"]["a"]["executor_info"]["ort"]["session_options"].pop(EXTERNAL_FOLDER)
    )
    seal(sharing)
    with pytest.raises(BundleError, match="which is not in the bundle as 'models/model/a/"):
        open_bundle(sharing)


def test_weights_that_would_take_the_models_place_are_refused(sharing: Path) -> None:
    """Weights with the model's name are refused. For older runtimes, model and weights are linked into one folder."""
    component = json.loads((sharing / COMPONENT).read_bytes())
    ort = component["variants"]["a"]["executor_info"]["ort"]
    own = sharing / "models/model/a"
    (own / "weights").mkdir()
    with open_bundle(sharing) as opened:
        first = opened.components["model"][0]
        assert first.model is not None
        for file in Path(first.session_options[EXTERNAL_FOLDER]).iterdir():
            shutil.copy(file, own / "weights")
    (own / "weights" / "model.onnx").write_bytes(b"another model")
    ort["session_options"][EXTERNAL_FOLDER] = "weights"
    (sharing / COMPONENT).write_text(json.dumps(component))
    seal(sharing)
    with pytest.raises(BundleError, match="would be the same file in one folder"):
        open_bundle(sharing)


def test_a_model_beside_its_weights_is_gathered_once(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"model")
    (tmp_path / "w.bin").write_bytes(b"weights")
    with _gather_files(tmp_path / "model.onnx", tmp_path) as gathered:
        assert sorted(file.name for file in gathered.parent.iterdir()) == ["model.onnx", "w.bin"]
    assert (tmp_path / "model.onnx").read_bytes() == b"model"
