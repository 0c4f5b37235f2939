"""A bundle sets only options that have a row in options.json, and only to the values of that row."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from edgeq_device.bundle.options import BRIEF_SPIN, OptionRule, provider_problem, rules, session_problem
from edgeq_device.bundle.package import open_bundle
from edgeq_device.bundle.variants import EXTERNAL_FOLDER
from edgeq_device.engines.catalog import EngineSpec, engine_options, engines
from edgeq_device.errors import BundleError
from edgeq_device.system.places import own_table
from onnx import helper

from edgeq.backends.tensorrt.options import explicit_options, table_options
from edgeq.bundle.plan import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.calibration.table import FLATBUFFERS
from edgeq.cli import group
from edgeq.errors import UsageError
from edgeq.hardware.profile import load_profiles
from edgeq.util.registry import shipped

from .attacks.directories import MODEL, edit_ort, edit_variant, seal
from .samples import HERE, INPUT, linear, tree, variant

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "targets" / "runtime"
CPU, CUDA, TRT, QNN = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "Tensorrt", "QNN"))
PRECISION = "session.x64quantprecision"
PROVIDERS = tuple(own_table("bundle/options.json")["providers"])
ALL = [("", key, rule) for key, rule in rules().items()] + [
    (ep, key, rule) for ep in PROVIDERS for key, rule in rules(ep).items()
]

# All options of ONNX Runtime 1.31.1 that open, write or load something or that set threads, and unknown options.
SESSION = (
    *(
        "node_partition_config_file",
        "resource_cuda_partitioning_settings",
        "enable_profiling",
        "optimized_model_filepath",
    ),
    *("debug_layout_transformation", "collect_node_memory_stats_to_file", "layer_assignment_settings", "log_id"),
    *("optimized_model_external_initializers_file_name", "save_external_prepacked_constant_initializers"),
    *("moe_expert_counter_state_file", "use_ort_model_bytes_directly", "use_ort_model_bytes_for_initializers"),
    *("load_model_format", "save_model_format", "use_external_initializer_file_buffers_directly", "compile_only"),
    *(
        "use_memory_mapped_ort_model",
        "intra_op_num_threads",
        "intra_op_thread_affinities",
        "name_based_layer_assignment",
    ),
    *("X64quantprecision", "x64quantprecision ", "no_such_option", "", "x64quantprecision\0", "x" * 200),
)
CONTEXT = (
    *("enable", "file_path", "embed_mode", "node_name_prefix", "model_external_initializers_file_name"),
    *("../share_ep_contexts", "stop_share"),
)
PROVIDER = {
    TRT: (
        *("trt_engine_cache_path", "trt_engine_cache_prefix", "trt_timing_cache_path", "trt_onnx_bytestream"),
        *(
            "trt_onnx_bytestream_size",
            "trt_onnx_model_folder_path",
            "trt_extra_plugin_lib_paths",
            "user_compute_stream",
        ),
        *(
            "trt_ep_context_file_path",
            "trt_dump_ep_context_model",
            "trt_dump_subgraphs",
            "trt_engine_decryption_enable",
        ),
        *("trt_engine_decryption_lib_path", "trt_weight_stripped_engine_enable", "has_user_compute_stream", "trt_new"),
        *(
            "trt_external_data_bytestream",
            "trt_external_data_bytestream_size",
            "TRT_fp16_enable",
            "trt_preview_features",
        ),
    ),
    CUDA: (
        *("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache", "user_compute_stream", "new_option"),
        *("has_user_compute_stream", "default_memory_arena_cfg", "do_copy_in_default_stream"),
    ),
    QNN: (
        *("backend_path", "op_packages", "profiling_file_path", "profiling_level", "dump_json_qnn_graph", "json_dir"),
        *("skel_library_path", "json_qnn_graph_dir", "qnn_saver_path", "extended_udma", "qnn_context_cache_path"),
    ),
    "CoreMLExecutionProvider": ("ModelCacheDirectory", "ProfileComputePlan"),
    "OpenVINOExecutionProvider": ("cache_dir", "load_config", "context", "device_id", "layout", "reshape_input"),
    "MIGraphXExecutionProvider": ("migraphx_save_model_path", "migraphx_load_model_path", "migraphx_model_cache_dir"),
    "VitisAIExecutionProvider": ("config_file", "cache_dir"),
    "NvTensorRTRTXExecutionProvider": ("nv_runtime_cache_path", "device_id"),
    "AzureExecutionProvider": ("endpoint",),
    "NoSuchExecutionProvider": ("device_id",),
    CPU: ("use_arena", "library_path"),
}
VALUES = (
    *(("", PRECISION, value) for value in ("", "2", "true", "1 ", "1\n", "１", "1\0", "1" * 5000, "../x", "\x1b[31m")),
    ("", "session.dynamic_block_base", "-1"),
    ("", "session.dynamic_block_base", "04"),
    ("", "session.dynamic_block_base", "+4"),
    ("", "session.dynamic_block_base", "1025"),
    ("", "session.dynamic_block_base", "9" * 900),
    ("", "session.dynamic_block_base", "٤"),
    ("", "session.intra_op.spin_duration_us", "10001"),
    ("", "optimization.disable_specified_optimizers", "A;;B"),
    ("", "optimization.disable_specified_optimizers", "A;../x"),
    ("", "optimization.disable_specified_optimizers", "A" * 513),
    (TRT, "trt_int8_calibration_table_name", "../calibration.flatbuffers"),
    (TRT, "trt_int8_calibration_table_name", "/etc/calibration.flatbuffers"),
    (TRT, "trt_int8_calibration_table_name", "graph_sm86.engine"),
    (TRT, "trt_profile_min_shapes", "x:1x3; rm"),
    (TRT, "trt_tactic_sources", "+CUBLAS,/x.so"),
    (CUDA, "arena_extend_strategy", "kOther"),
    (CUDA, "gpu_mem_limit", "1e9"),
    (QNN, "backend_type", "saver"),
    (QNN, "backend_type", "../../evil.so"),
    ("OpenVINOExecutionProvider", "device_type", "HETERO:GPU,CPU"),
    ("OpenVINOExecutionProvider", "load_config", '{"CPU":{"CACHE_DIR":"/tmp"}}'),
)
REFUSED = [
    *(("", f"session.{key}", "1") for key in SESSION),
    *(("", f"ep.context_{key}", "1") for key in CONTEXT),
    ("", "ep.share_ep_contexts", "1"),
    ("", "ep.stop_share_ep_contexts", "1"),
    *((ep, key, "1") for ep, keys in PROVIDER.items() for key in keys),
    *VALUES,
]


def changes(ep: str, key: str, value: str) -> dict[str, Any]:
    """Return the fields that give a variant this option. `ep` is "" for a session option."""
    return {"ep": ep, "provider_options": {key: value}} if ep else {"session_options": {key: value}}


def poison(root: Path, ep: str, key: str, value: str) -> None:
    plain = changes(ep, key, value)

    def change(body: dict[str, Any]) -> None:
        body["ep"] = plain.pop("ep", CPU)
        body["executor_info"]["ort"].update(plain)

    edit_variant(root, change)


def zipped(root: Path) -> Path:
    place = root.with_suffix(".edgeq")
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in tree(root).items():
            archive.writestr(name, data)
    return place


@pytest.fixture(scope="module")
def spoiled(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy a bundle. Each test here writes its component.json anew."""
    return Path(shutil.copytree(good, tmp_path_factory.mktemp("options") / "bundle"))


@pytest.mark.parametrize(("ep", "key", "value"), REFUSED, ids=ascii)
def test_an_option_without_a_row_is_refused(ep: str, key: str, value: str, spoiled: Path) -> None:
    poison(spoiled, ep, key, value)
    also_zipped = (ep, key, value) in REFUSED[::10]
    for bundle in (spoiled, zipped(spoiled)) if also_zipped else (spoiled,):
        with pytest.raises(BundleError, match=r"(session|provider) option") as refusal:
            open_bundle(bundle)
        assert str(refusal.value).isascii()
        assert str(refusal.value).isprintable()
        assert len(str(refusal.value)) < 700 + len(str(bundle))
    with pytest.raises(UsageError, match=r"(session|provider) option"):
        variant("v", Path("m.onnx"), 0.0, **changes(ep, key, value))


@pytest.mark.parametrize("engine", [e for e in engines().values() if e.module], ids=lambda e: str(e.name))
def test_accepts_only_the_described_values_of_plugin_options(engine: EngineSpec) -> None:
    for precision in engine.precisions:
        for key, value in engine_options(engine, precision).items():
            assert provider_problem(engine.provider, key, value) == ""
            assert provider_problem(engine.provider, key, f"{value} ")


@pytest.mark.parametrize(("ep", "key", "rule"), ALL, ids=lambda part: "" if isinstance(part, OptionRule) else part)
def test_every_row_gives_its_reason_and_takes_some_values(ep: str, key: str, rule: OptionRule) -> None:
    assert len(rule.why) > 5
    assert len(rule.source) > 5
    (kind,) = rule.form
    bounds = rule.form[kind]
    good = {"one_of": lambda: bounds, "whole": lambda: map(str, bounds), "words": lambda: [words(bounds)]}
    good["shapes"] = lambda: ["x:1x3x224,a/b.c:0:2x4"]
    problem = (lambda value: provider_problem(ep, key, value)) if ep else (lambda value: session_problem(key, value))
    for value in good[kind]() if kind in good else ["anything"]:
        assert problem(value) == ""
    for value in ("", "\0", "é", "a\nb", "x" * 1025):
        assert problem(value)
    if not rule.place:
        for value in ("/etc/passwd", "../x", "..\\x", "C:x.so", "a b", "$(id)"):
            assert problem(value), value


def words(limits: Mapping[str, Any]) -> str:
    return limits["between"].join(["Abc", "d9"]) + limits.get("ending", "")


def test_no_row_takes_a_path_but_of_the_bundle() -> None:
    assert [key for _, key, rule in ALL if rule.place] == [EXTERNAL_FOLDER]


def test_allows_every_option_that_edgeq_writes() -> None:
    for profile in load_profiles([shipped("profiles")]).values():
        pairs = [*profile.scheme.session_options.items()]
        pairs += [(k, v) for k, values in profile.search.get("session_options", {}).items() for v in values]
        assert all(session_problem(key, value, references=False) == "" for key, value in pairs), profile.name
    assert all(session_problem(key, value) == "" for key, value in BRIEF_SPIN.items())
    assert session_problem("optimization.disable_specified_optimizers", "GeluFusion;SkipLayerNormFusion") == ""
    assert session_problem(EXTERNAL_FOLDER, "sha256:" + "0" * 64) == ""
    for options in (*map(explicit_options, ("float32", "float16", "bfloat16")), table_options(FLATBUFFERS)):
        assert [provider_problem(TRT, key, value) for key, value in options.items()] == [""] * len(options)


def test_the_writer_sets_references_itself() -> None:
    with pytest.raises(UsageError, match="sets itself"):
        variant("v", Path("m.onnx"), 0.0, session_options={EXTERNAL_FOLDER: "weights"})
    with pytest.raises(UsageError, match="cannot name an execution provider"):
        variant("v", Path("m.onnx"), 0.0, ep="a b")


def test_the_table_is_the_readers_own(good: Path, copy: Path, tmp_path: Path) -> None:
    """The reader's own table of options decides, not the table that the bundle brings for its runner."""
    table = "edgeq_device/bundle/options.json"
    with zipfile.ZipFile(copy / "edgeq_device.zip") as archive:
        values = json.loads(archive.read(table))
    values["session"]["session.node_partition_config_file"] = {"form": "switch", "why": "x", "source": "x"}
    with zipfile.ZipFile(copy / "edgeq_device.zip", "w") as archive:
        archive.writestr(table, json.dumps(values))
    poison(copy, "", "session.node_partition_config_file", "1")
    for command in (
        ["-m", "edgeq", "verify", str(copy)],
        [str(good / "edgeq_run.py"), "verify", "--bundle", str(copy)],
    ):
        assert "node_partition_config_file" in refused(command, tmp_path, code=7)


def run(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    search = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(RUNTIME)]), **environment}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **search},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(command: list[str], cwd: Path, code: int) -> str:
    """Return the line on stderr. edgeq's own commands run in this process, because a new Python would take longer than
    they do.
    """
    if command[:2] == ["-m", "edgeq"]:
        with contextlib.chdir(cwd):
            done = CliRunner().invoke(group, command[2:])
        ended, err = done.exit_code, done.stderr
    else:
        process = run(command, cwd)
        ended, err = process.returncode, process.stderr
    assert ended == code, (ended, err)
    assert len(err.splitlines()) == 1, err
    return err


def hostile(folder: Path) -> Path:
    """Write a bundle whose nodes have shell commands in their names."""
    model = onnx.load(linear(folder / "m.onnx", 0.0))
    for node in model.graph.node:
        node.name = f"$(touch pwned) {node.name}"
    onnx.save(model, folder / "m.onnx")
    write_bundle(BundleSpec("x", (variant("plain", folder / "m.onnx", 0.0),)), folder / "b")
    return folder / "b"


@pytest.mark.parametrize("form", ["directory", "zip"])
def test_the_partition_file_is_not_written(form: str, tmp_path: Path) -> None:
    """The original attack fails: a bundle cannot write a file of commands to a path of its choice."""
    bundle, cwd = hostile(tmp_path), tmp_path / "cwd"
    cwd.mkdir()
    edit_ort(bundle, session_options={"session.node_partition_config_file": str(cwd / ".profile")})
    there = bundle if form == "directory" else zipped(bundle)
    data = tmp_path / "x.npz"
    np.savez(data, x=INPUT)
    own = [str(bundle / "edgeq_run.py")] if form == "directory" else [str(there)]
    for command in (
        ["-m", "edgeq", "verify", str(there)],
        ["-m", "edgeq", "bench", str(there)],
        ["-m", "edgeq", "report", str(there), "--bench", "-o", "r.html"],
        ["-m", "edgeq", "eval", str(there), "--data", str(data), "--reference", str(there)],
        ["-m", "edgeq", "compare", str(there), str(there), "--data", str(data)],
        [*own, "info"],
        [*own, "verify"],
        [*own, "bench"],
        [*own, "infer", str(data), "-o", "out.npz"],
    ):
        assert "session option 'session.node_partition_config_file' is not one" in refused(command, cwd, code=7)
    assert list(cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("ep", "key"),
    [("", "session.resource_cuda_partitioning_settings"), (QNN, "backend_path"), (TRT, "trt_extra_plugin_lib_paths")],
)
def test_both_readers_refuse_with_the_documented_code(
    ep: str, key: str, good: Path, copy: Path, tmp_path: Path
) -> None:
    poison(copy, ep, key, "/tmp/x.so")
    for bundle in (copy, zipped(copy)):
        assert key in refused(["-m", "edgeq", "verify", str(bundle)], tmp_path, code=7)
        assert key in refused([str(good / "edgeq_run.py"), "verify", "--bundle", str(bundle)], tmp_path, code=7)


def test_a_compiled_program_is_refused_by_both_and_by_the_writer(good: Path, copy: Path, tmp_path: Path) -> None:
    model = onnx.load(copy / MODEL)
    context = {"ep_cache_context": "../../secret", "embed_mode": 0, "source": TRT}
    model.graph.node[0].CopyFrom(helper.make_node("EPContext", ["x", "w"], ["m"], domain="com.microsoft", **context))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, copy / MODEL)
    seal(copy)
    for command in (
        ["-m", "edgeq", "verify", str(copy)],
        [str(good / "edgeq_run.py"), "verify", "--bundle", str(copy)],
    ):
        assert "contains code compiled for one device (EPContext)" in refused(command, tmp_path, code=7)
    (tmp_path / "c.onnx").write_bytes((copy / MODEL).read_bytes())
    from edgeq.errors import BundleError as EdgeqBundleError

    with pytest.raises(EdgeqBundleError, match="EPContext"):
        write_bundle(BundleSpec("x", (variant("v", tmp_path / "c.onnx", 0.0),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_models_metadata_sets_no_options(tmp_path: Path) -> None:
    """Options in a model's metadata do not apply. If ORT_LOAD_CONFIG_FROM_MODEL is set, ONNX Runtime would read them,
    such as one that writes a profile to the current directory.
    """
    model = onnx.load(linear(tmp_path / "m.onnx", 0.0))
    helper.set_model_props(model, {"ort_config": json.dumps({"session_options": {"enable_profiling": 1}})})
    onnx.save(model, tmp_path / "m.onnx")
    bundle, cwd = tmp_path / "b", tmp_path / "cwd"
    write_bundle(BundleSpec("x", (variant("v", tmp_path / "m.onnx", 0.0, info={"architecture": HERE}),)), bundle)
    cwd.mkdir()
    few = ["--duration", "0.02", "--queries", "2"]
    for command in (
        ["-m", "edgeq", "verify", str(bundle)],
        ["-m", "edgeq", "bench", str(bundle), *few],
        ["-m", "edgeq", "bench", str(tmp_path / "m.onnx"), *few, "--shape", "x=2x48"],
        [str(bundle / "edgeq_run.py"), "bench", *few],
    ):
        done = run(command, cwd, ORT_LOAD_CONFIG_FROM_MODEL="1")
        assert done.returncode == 0, done.stderr
        assert list(cwd.iterdir()) == [], command


def test_allowed_options_arrive(copy: Path) -> None:
    options = {PRECISION: "1", "session.dynamic_block_base": "4", "session.set_denormal_as_zero": "0"}
    edit_ort(copy, session_options=options)
    with open_bundle(copy) as bundle:
        assert bundle.components["model"][0].session_options == options
    poison(copy, "XnnpackExecutionProvider", "intra_op_num_threads", "4")
    with open_bundle(copy) as bundle:
        assert bundle.components["model"][0].provider_options == {"intra_op_num_threads": "4"}
    assert dataclasses.asdict(variant("v", Path("m.onnx"), 0.0, session_options=options))["session_options"] == options


def test_the_documentation_names_every_option() -> None:
    text = (ROOT / "docs" / "reference" / "bundle.md").read_text("utf-8")
    named = set(text.split("## Options")[1].split("\n## ")[0].replace("`", " ").replace(",", " ").split())
    assert [key for _, key, _ in ALL if key not in named] == []
    assert [ep for ep in PROVIDERS if ep not in named] == []
