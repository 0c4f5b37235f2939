"""Make hostile and damaged bundle directories. Each attack changes a good bundle in place.

`sealed` attacks write a manifest that matches the changed files, as an attacker would. Then only the check under test
can stop them. The text next to each attack must be in the error message.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

Attack = Callable[[Path], None]
ATTACKS: dict[str, tuple[Attack, str]] = {}

COMPONENT = "models/model/component.json"
MODEL = "models/model/plain/model.onnx"


def attack(says: str) -> Callable[[Attack], Attack]:
    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__] = (function, says)
        return function

    return register


def seal(root: Path, **changes: Any) -> None:
    """Make the manifest match the files in the folder. `changes` update its top level."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    manifest["additional_metadata"]["edgeq"]["files"] = {
        path.relative_to(root).as_posix(): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "size": path.stat().st_size,
        }
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    (root / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def edit(root: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((root / name).read_bytes())
    change(values)
    (root / name).write_text(json.dumps(values))


def change_info(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change edgeq's record of the variant `plain`."""
    edit(root, COMPONENT, lambda c: change(c["variants"]["plain"]["executor_info"]["edgeq"]))


def edit_manifest(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(root, "manifest.json", change)


def edit_files(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_manifest(root, lambda m: change(m["additional_metadata"]["edgeq"]["files"]))


def edit_variant(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(root, COMPONENT, lambda c: change(c["variants"]["plain"]))
    seal(root)


def edit_ort(root: Path, **changes: Any) -> None:
    edit_variant(root, lambda v: v["executor_info"]["ort"].update(changes))


# Files


@attack("was changed")
def flipped_byte(root: Path) -> None:
    data = bytearray((root / MODEL).read_bytes())
    data[len(data) // 2] ^= 1
    (root / MODEL).write_bytes(data)


@attack("the manifest states")
def truncated_file(root: Path) -> None:
    (root / MODEL).write_bytes((root / MODEL).read_bytes()[:-1])


@attack("the manifest states")
def longer_file(root: Path) -> None:
    with (root / MODEL).open("ab") as stream:
        stream.write(b"\0")


@attack("was changed")
def changed_runner(root: Path) -> None:
    text = (root / "edgeq_run.py").read_bytes()
    (root / "edgeq_run.py").write_bytes(text.replace(b"main", b"mian", 1))


@attack("is missing")
def missing_file(root: Path) -> None:
    (root / MODEL).unlink()


@attack("not in the manifest")
def extra_file(root: Path) -> None:
    (root / "models" / "numpy.py").write_text("raise SystemExit")


@attack("is a link")
def link_to_a_file(root: Path) -> None:
    (root / MODEL).rename(root.parent / "elsewhere.onnx")
    (root / MODEL).symlink_to(root.parent / "elsewhere.onnx")


@attack("is a link")
def link_to_a_directory(root: Path) -> None:
    (root / "models").rename(root.parent / "elsewhere")
    (root / "models").symlink_to(root.parent / "elsewhere", target_is_directory=True)


@attack("not a regular file")
def pipe(root: Path) -> None:
    (root / MODEL).unlink()
    os.mkfifo(root / MODEL)


# The manifest


def edit_info(root: Path, **changes: Any) -> None:
    change_info(root, lambda info: info.update(changes))
    seal(root)


@attack("min_onnxruntime is not a version")
def version_of_many_digits(root: Path) -> None:
    edit_info(root, min_onnxruntime="9" * 5000)


@attack("min_tensorrt is not a version")
def version_is_a_number(root: Path) -> None:
    edit_info(root, min_tensorrt=10)


@attack("below_tensorrt is not a version")
def version_with_an_escape(root: Path) -> None:
    edit_info(root, below_tensorrt="10.0\x1b[2J")


@attack("half a character")
def half_a_character(root: Path) -> None:
    seal(root, package_name="\ud800")


@attack("is the name of a device on Windows")
def name_of_a_device(root: Path) -> None:
    edit_files(root, lambda files: files.update({"models/nul.npz": files["edgeq_run.py"]}))


@attack("unknown key 'run_this'")
def unknown_key(root: Path) -> None:
    seal(root, run_this="x")


@attack("schema_version is '2.0'")
def later_schema(root: Path) -> None:
    seal(root, schema_version="2.0")


@attack("schema_version is 1")
def schema_as_a_number(root: Path) -> None:
    seal(root, schema_version=1)


@attack("bundle schema is '9.9'")
def later_bundle_schema(root: Path) -> None:
    edit_manifest(root, lambda m: m["additional_metadata"]["edgeq"].update(bundle_schema="9.9"))


@attack("layout is 'installed'")
def installed_layout(root: Path) -> None:
    seal(root, layout="installed")


@attack("shared_assets moves assets")
def moved_assets(root: Path) -> None:
    seal(root, shared_assets={"sha256:" + "0" * 64: "/etc"})


@attack("additional_metadata is missing")
def no_metadata(root: Path) -> None:
    edit_manifest(root, lambda m: m.pop("additional_metadata"))


@attack("there is no component")
def no_components(root: Path) -> None:
    seal(root, components={})


@attack("not a plain path")
def component_outside(root: Path) -> None:
    seal(root, components={"model": "../models/model"})


@attack("is absolute")
def component_absolute(root: Path) -> None:
    seal(root, components={"model": "/models/model"})


@attack("is not in the bundle")
def component_nowhere(root: Path) -> None:
    seal(root, components={"model": "models/nothing"})


@attack("is not a JSON object")
def manifest_is_a_list(root: Path) -> None:
    (root / "manifest.json").write_text("[]")


@attack("is not valid JSON")
def manifest_is_cut(root: Path) -> None:
    data = (root / "manifest.json").read_bytes()
    (root / "manifest.json").write_bytes(data[: len(data) // 2])


@attack("is not valid JSON")
def manifest_is_not_text(root: Path) -> None:
    (root / "manifest.json").write_bytes(b'{"schema_version": "\xff\xfe"}')


@attack("nested more than")
def manifest_is_deep(root: Path) -> None:
    (root / "manifest.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


@attack("is larger than")
def manifest_is_huge(root: Path) -> None:
    (root / "manifest.json").write_bytes(b" " * (16 * 1024 * 1024 + 1))


@attack("appears twice")
def key_twice(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text('{"schema_version": "1.0",' + text.lstrip()[1:])


@attack("too many digits")
def endless_number(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text('{"n": ' + "9" * 5000 + "," + text.lstrip()[1:])


@attack("is not a JSON number")
def not_a_number(root: Path) -> None:
    edit_manifest(root, lambda m: m["additional_metadata"].update(x=float("nan")))


@attack("a number is too large")
def infinite_number(root: Path) -> None:
    text = (root / "manifest.json").read_text()
    (root / "manifest.json").write_text('{"n": 1e999,' + text.lstrip()[1:])


# Names and sizes in the manifest


@attack("not a plain path")
def name_outside(root: Path) -> None:
    edit_files(root, lambda f: f.update({"../../escaped": f[MODEL]}))


@attack("is absolute")
def name_absolute(root: Path) -> None:
    edit_files(root, lambda f: f.update({"/etc/passwd": f[MODEL]}))


@attack("not allowed")
def name_with_backslash(root: Path) -> None:
    edit_files(root, lambda f: f.update({"..\\escaped": f[MODEL]}))


@attack("not allowed")
def name_with_drive(root: Path) -> None:
    edit_files(root, lambda f: f.update({"C:escaped": f[MODEL]}))


@attack("not allowed")
def name_with_newline(root: Path) -> None:
    edit_files(root, lambda f: f.update({"a\nb": f[MODEL]}))


@attack("occurs twice")
def name_differs_in_case(root: Path) -> None:
    edit_files(root, lambda f: f.update({MODEL.upper(): f[MODEL]}))


@attack("occurs twice")
def manifest_in_the_manifest(root: Path) -> None:
    edit_files(root, lambda f: f.update({"manifest.json": f[MODEL]}))


@attack("both a file and the directory")
def file_and_directory(root: Path) -> None:
    edit_files(root, lambda f: f.update({f"{MODEL}/inner": f[MODEL]}))


@attack("no proper size")
def negative_size(root: Path) -> None:
    edit_files(root, lambda f: f[MODEL].update(size=-1))


@attack("no proper size")
def size_is_true(root: Path) -> None:
    edit_files(root, lambda f: f[MODEL].update(size=True))


@attack("no proper sha256")
def short_hash(root: Path) -> None:
    edit_files(root, lambda f: f[MODEL].update(sha256="abc"))


@attack("does not have the hash")
def changed_asset(root: Path) -> None:
    asset = next((root / "shared_assets").glob("*/weights.bin"))
    asset.write_bytes(bytes(asset.stat().st_size))
    seal(root)


@attack("does not have the hash")
def stray_asset(root: Path) -> None:
    (root / "shared_assets" / "loose.bin").write_bytes(b"x")
    seal(root)


# Components and variants, sealed


@attack("unknown key 'hooks'")
def unknown_component_key(root: Path) -> None:
    edit(root, COMPONENT, lambda c: c.update(hooks=[]))
    seal(root)


@attack("unknown key 'command'")
def unknown_variant_key(root: Path) -> None:
    edit_variant(root, lambda v: v.update(command="sh"))


@attack("there is no variant")
def no_variants(root: Path) -> None:
    edit(root, COMPONENT, lambda c: c.update(variants={}))
    seal(root)


@attack("not a plain name")
def variant_name_outside(root: Path) -> None:
    edit(root, COMPONENT, lambda c: c["variants"].update({"../up": c["variants"]["plain"]}))
    seal(root)


@attack("not a plain path")
def variant_directory_outside(root: Path) -> None:
    edit_variant(root, lambda v: v.update(variant_directory="../../.."))


@attack("does not exist")
def variant_directory_missing(root: Path) -> None:
    edit_variant(root, lambda v: v.update(variant_directory="nowhere"))


@attack("neither an object nor a file name")
def no_edgeq_information(root: Path) -> None:
    edit_variant(root, lambda v: v["executor_info"].pop("edgeq"))


@attack("unknown key 'custom_ops'")
def unknown_ort_key(root: Path) -> None:
    edit_ort(root, custom_ops="evil.so")


@attack("not a plain path")
def model_outside(root: Path) -> None:
    edit_ort(root, model_file="../../../../etc/passwd")


@attack("is absolute")
def model_absolute(root: Path) -> None:
    edit_ort(root, model_file="/etc/passwd")


@attack("is not in the bundle")
def model_nowhere(root: Path) -> None:
    edit_ort(root, model_file="other.onnx")


@attack("not a plain path")
def model_outside_its_asset(root: Path) -> None:
    asset = next((root / "shared_assets").iterdir()).name
    edit_ort(root, model_file=f"{asset.replace('-', ':')}/../../{MODEL}")


@attack("not a proper shared-asset reference")
def asset_without_a_hash(root: Path) -> None:
    edit_ort(root, model_file="sha256:../../models")


@attack("is not one that a bundle may set")
def option_that_writes(root: Path) -> None:
    edit_ort(root, session_options={"session.optimized_model_filepath": "/tmp/x"})


@attack("not a string")
def option_is_a_list(root: Path) -> None:
    edit_ort(root, session_options={"session.x64quantprecision": ["1"]})


@attack("is absolute")
def weights_folder_outside(root: Path) -> None:
    edit_ort(root, session_options={"session.model_external_initializers_file_folder_path": "/etc"})


@attack("is not in the bundle as a folder")
def weights_folder_is_a_file(root: Path) -> None:
    edit_ort(root, session_options={"session.model_external_initializers_file_folder_path": "model.onnx"})


@attack("does not name an execution provider")
def provider_with_a_newline(root: Path) -> None:
    edit_variant(root, lambda v: v.update(ep="CPUExecutionProvider\n"))


@attack("does not name an execution provider")
def provider_without_end(root: Path) -> None:
    edit_variant(root, lambda v: v.update(ep="C" * 1000))


@attack("contains code compiled for one device (EPContext)")
def compiled_program(root: Path) -> None:
    model = onnx.load(root / MODEL)
    model.graph.node.add(op_type="EPContext", domain="com.microsoft", output=["unused"])
    (root / MODEL).write_bytes(model.SerializeToString())
    seal(root)


@attack("is in ONNX Runtime's own format")
def runtimes_own_format(root: Path) -> None:
    (root / MODEL).write_bytes(b"\x18\0\0\0ORTM" + b"\0" * 100)
    seal(root)


@attack("does not have the suffix .onnx")
def runtimes_own_suffix(root: Path) -> None:
    (root / MODEL).rename(root / MODEL.replace(".onnx", ".ORT"))
    edit_ort(root, model_file="model.ORT")


@attack("table 'graph_sm86.engine' is 'graph_sm86.engine'; it can be")
def engine_as_a_table(root: Path) -> None:
    change_info(root, lambda i: i.update(table="graph_sm86.engine", table_file=MODEL))
    seal(root)


@attack("is not in the bundle")
def vectors_outside(root: Path) -> None:
    def change(info: dict[str, Any]) -> None:
        info["selftest"]["cases"][0]["inputs"] = "../../x.npz"

    change_info(root, change)
    seal(root)


@attack("is not an object of the self-test's outputs")
def slices_of_no_output(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_slices={"z": []}))
    seal(root)


@attack("a slice has an axis")
def slice_that_is_a_list(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_slices={"y": [[1, 0, 1, 0.5]]}))
    seal(root)


@attack("is not from a first to a last index")
def slice_that_ends_before_it_begins(root: Path) -> None:
    part = {"axis": 1, "first": 2, "last": 1, "tolerance": 0.5}
    change_info(root, lambda i: i.update(selftest_slices={"y": [part]}))
    seal(root)


@attack("is not from a first to a last index")
def slice_of_an_axis_that_is_true(root: Path) -> None:
    part = {"axis": True, "first": 0, "last": 1, "tolerance": 0.5}
    change_info(root, lambda i: i.update(selftest_slices={"y": [part]}))
    seal(root)


@attack("is not a list of at most")
def thousands_of_slices(root: Path) -> None:
    part = {"axis": 1, "first": 0, "last": 1, "tolerance": 0.5}
    change_info(root, lambda i: i.update(selftest_slices={"y": [part] * 5000}))
    seal(root)


@attack("names an output that the self-test does not have")
def basis_of_no_output(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_basis={"limits": {"z": 1.0}}))
    seal(root)


@attack("the limit of 'y' is not a number of 0 or more")
def basis_of_a_negative_limit(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_basis={"limits": {"y": -1.0}}))
    seal(root)


@attack("the place of 'y' is not an axis")
def basis_of_an_axis_that_is_true(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_basis={"ranked": {"y": {"place": True, "origin": "TopK"}}}))
    seal(root)


@attack("positions have no mask")
def basis_without_a_mask(root: Path) -> None:
    axes = {"y": {"place": 1, "origin": "mask"}}
    change_info(root, lambda i: i.update(selftest_basis={"padding": {"masks": {}, "axes": axes}}))
    seal(root)


@attack("masks are not true or false")
def basis_of_a_mask_of_numbers(root: Path) -> None:
    change_info(root, lambda i: i.update(selftest_basis={"padding": {"masks": {"mask": 1}, "axes": {}}}))
    seal(root)


@attack("the tolerance of a slice is not a number of 0 or more")
def slice_of_negative_tolerance(root: Path) -> None:
    part = {"axis": 1, "first": 0, "last": 1, "tolerance": -0.5}
    change_info(root, lambda i: i.update(selftest_slices={"y": [part]}))
    seal(root)


@attack("is not a number of 0 or more")
def negative_tolerance(root: Path) -> None:
    change_info(root, lambda i: i["selftest"]["tolerance"].update(y=-1))
    seal(root)


@attack("rank is not a whole number")
def rank_is_text(root: Path) -> None:
    change_info(root, lambda i: i.update(rank="high"))
    seal(root)


@attack("is not a list of strings")
def features_are_a_string(root: Path) -> None:
    change_info(root, lambda i: i.update(required_features="avx2"))
    seal(root)
