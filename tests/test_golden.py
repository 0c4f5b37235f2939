"""Compare edgeq's interface with tests/golden/recorded. `python -m tests.golden` records it again."""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

from edgeq import demo
from edgeq.cli import group
from tests.bundle.signing.keys import write_key
from tests.golden import artifacts, interface, key_tree
from tests.golden.recorded_files import check
from tests.graphs import proto

MODEL, CALIBRATION = str(demo.MODEL), str(demo.CALIBRATION)
DATA = ("--data", CALIBRATION, "--count", "4")
UNTIMED = ("--no-timing", "--no-emulate")
PROVED = (*DATA, "--val", "few.npz", "--task", "classification", *UNTIMED)
LABELLED = ("--data", "few.npz", "--task", "classification")
SHORT = ("--duration", "0.02")
BRIEF = (*SHORT, "--queries", "5")
LIMITS = (*SHORT, "--limits", "limits.toml")

COMMANDS: dict[str, tuple[str, ...]] = {
    "detect": ("detect",),
    "doctor": ("doctor",),
    "profiles list": ("profiles", "list"),
    "profiles show": ("profiles", "show", "x86-64-avx2"),
    "targets list": ("targets", "list"),
    "targets show": ("targets", "show", "gemmini"),
    "preprocess list": ("preprocess", "list"),
    "preprocess show": ("preprocess", "show", "imagenet"),
    "extensions": ("extensions",),
    "emulate status": ("emulate", "status"),
    "device list": ("device", "list"),
    "inspect": ("inspect", MODEL, "-t", "haswell", "-t", "gemmini"),
    "demo files": ("demo", "--files", "files"),
    "calibrate collect": ("calibrate", "collect", MODEL, *DATA, "-o", "first"),
    "calibrate shard": ("calibrate", "collect", MODEL, *DATA, "--start", "4", "-o", "second"),
    "calibrate merge": ("calibrate", "merge", "first", "second", "-o", "both"),
    "calibrate show": ("calibrate", "show", "both"),
    "quantize": ("quantize", MODEL, *PROVED, "-t", "haswell", "-o", "int8.onnx"),
    "quantize weight-only": ("quantize", MODEL, *DATA, *UNTIMED, "-t", "zen4", "--weight-only", "4", "-o", "4.onnx"),
    "quantize systolic": ("quantize", MODEL, *DATA, *UNTIMED, "-t", "gemmini", "-o", "gemmini.onnx"),
    "emit-c": ("emit-c", "gemmini.onnx", "--data", CALIBRATION, "-o", "c"),
    "retarget": ("retarget", "int8.onnx", "--activation-type", "uint8", "--format", "QOperator", "-o", "other.onnx"),
    "audit": ("audit", "int8.onnx", "--data", "few.npz", "--float", MODEL),
    "debug": ("debug", MODEL, "int8.onnx", "--data", "few.npz"),
    "eval": ("eval", "int8.onnx", *LABELLED, "--reference", MODEL),
    "bench": ("bench", "int8.onnx", "--against", MODEL, *BRIEF),
    "bench scenarios": ("bench", "int8.onnx", "--scenario", "all", "--qps", "100", *BRIEF),
    "compare": ("compare", MODEL, "int8.onnx", *LABELLED, *SHORT),
    "gate": ("gate", "int8.onnx", "--baseline", "int8.onnx", *LABELLED, *LIMITS),
    "package": ("package", MODEL, *PROVED, "-t", "haswell", "-t", "nvidia-t4", "--with-float", "-o", "bundle"),
    "verify": ("verify", "bundle", "--variant", "haswell"),
    "sign": ("sign", "bundle", "--key", "key.pem"),
    "verify signed": ("verify", "bundle", "--variant", "haswell", "--trust", "key.pub"),
    "report": ("report", "bundle", "-o", "page.html"),
    "tune plan": ("tune", MODEL, *DATA, "--dry-run", "-o", "tuned"),
    "run": ("run", "recipe.toml"),
}

FAILURES: dict[str, tuple[str, ...]] = {
    "an unknown command": ("quantise",),
    "an unknown option": ("detect", "--unknown"),
    "an option that makes no sense": ("quantize", MODEL, *DATA, "--exclude", "nothing", "-o", "out.onnx"),
    "not a model": ("inspect", "limits.toml"),
    "no samples": ("quantize", MODEL, "--data", "missing/", "-o", "out.onnx"),
    "samples of another name": ("quantize", MODEL, "--data", "wrong.npz", "-o", "out.onnx"),
    "an unknown target": ("inspect", MODEL, "-t", "unknown"),
    "a place that holds something": ("quantize", MODEL, *DATA, "-o", "limits.toml"),
    "a changed bundle": ("verify", "changed"),
    "an unsigned bundle": ("verify", "unsigned", "--trust", "key.pub"),
    "a registry that refuses": ("pull", "127.0.0.1:9/name@sha256:" + "0" * 64, "-o", "pulled"),
    "statistics of another model": ("quantize", "renamed.onnx", *DATA, "--calibration", "first", "-o", "out.onnx"),
    "statistics that are none": ("calibrate", "show", "files"),
    "too little in int8": (
        *("quantize", MODEL, *DATA, *UNTIMED, "--op-type", "Gemm", "--require-coverage", "95%"),
        *("-o", "out.onnx"),
    ),
    "worse than the baseline": ("gate", MODEL, "--baseline", "int8.onnx", *LIMITS),
}


@dataclass(frozen=True)
class Session:
    """Hold a folder in which commands ran, and their results by name."""

    folder: Path
    ran: dict[str, Result]

    def json(self, name: str) -> Any:
        result = self.ran[name]
        assert result.exit_code == 0, f"{name}: {result.stderr or result.exception}"
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
            patch.setenv(name, str(folder / "home"))
        fill()
        ran = {name: run(*line) for name, line in COMMANDS.items()}
        yield Session(folder, ran)


def fill() -> None:
    with np.load(demo.VALIDATION) as arrays:
        np.savez("few.npz", **{name: array[:8] for name, array in arrays.items()})
        np.savez("wrong.npz", other=arrays["image"][:2])
    renamed = onnx.load(demo.MODEL)
    renamed.graph.name = "renamed"
    onnx.save(renamed, "renamed.onnx")
    write_key(Path())
    Path("limits.toml").write_text('inconclusive = "pass"\nmax_slowdown = 99.0\n', "utf-8")
    Path("recipe.toml").write_text('[profiles]\naction = "list"\n', "utf-8")


def run(*line: str) -> Result:
    return CliRunner().invoke(group, [*line, "--json", "-q"], prog_name="edgeq")


def test_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("edgeq.cli.")]:
        monkeypatch.delitem(sys.modules, name)  # another test may have imported it with a plug-in installed
    texts = []
    for path in all_commands((), group):
        result = CliRunner().invoke(group, [*path, "--help"], prog_name="edgeq", env={"COLUMNS": "120"})
        assert result.exit_code == 0, path
        texts.append("\n".join([f"===== edgeq {' '.join(path)}", result.stdout]))
    check("help.txt", "\n".join(texts))


def all_commands(path: tuple[str, ...], command: click.Command) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from all_commands((*path, name), found)


@pytest.mark.parametrize("name", COMMANDS)
def test_keys_of_json(session: Session, name: str) -> None:
    check(f"json/{name.replace(' ', '-')}.txt", key_tree.text(session.json(name)))


def test_bundle(session: Session) -> None:
    bundle = session.folder / "bundle"
    texts = ["files", *(f"  {line}" for line in sorted(file_names(bundle)))]
    for file in sorted(bundle.rglob("*.json")):
        tree = key_tree.key_tree(json.loads(file.read_bytes()), file.name)
        texts += [str(file.relative_to(bundle)), *key_tree.lines(tree, "  ")]
    check("bundle.txt", "\n".join(texts))


def file_names(folder: Path) -> set[str]:
    """Return the names of a bundle's files, with `*` for each digest."""
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return {re.sub(r"[0-9a-f]{32,}", "*", name) for name in names}


def test_metadata_of_models(session: Session) -> None:
    texts = []
    for name in ("int8.onnx", "4.onnx", "gemmini.onnx", "other.onnx"):
        model = onnx.load(session.folder / name, load_external_data=False)
        texts += [f"{name}: {model.producer_name}", *sorted(f"  {entry.key}" for entry in model.metadata_props)]
    check("models.txt", "\n".join(texts))


def test_headings_of_the_report(session: Session) -> None:
    page = (session.folder / "page.html").read_text("utf-8")
    found = re.findall(r"<(h[1-4])[^>]*>(.*?)</\1>", page, re.DOTALL)
    heads = [(tag, " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())) for tag, text in found]
    check("report.txt", "\n".join("  " * (int(tag[1]) - 1) + re.sub(r"\b\d+\b", "N", text) for tag, text in heads))


def test_folders_of_other_commands(session: Session) -> None:
    texts = [f"{place}/{name}" for place in ("both", "c", "files") for name in file_names(session.folder / place)]
    check("folders.txt", "\n".join(sorted(texts)))


def test_recipe(session: Session) -> None:
    result = run(*COMMANDS["quantize"], "--print-recipe")
    check("recipe.txt", key_tree.text(tomllib.loads(result.stdout)))


def test_exit_codes(session: Session) -> None:
    for name in ("changed", "unsigned"):
        shutil.copytree(session.folder / "bundle", session.folder / name)
        (session.folder / name / "model.sig").unlink()
    (session.folder / "changed" / "report.json").write_text("{}", "utf-8")
    lines = [*interface.exit_codes(), ""]
    lines += [f"{run(*line).exit_code:3} {name}" for name, line in FAILURES.items()]
    check("exit-codes.txt", "\n".join(lines))


def test_python_interface() -> None:
    check("edgeq.txt", "\n".join([*interface.public_names(), "", *interface.results()]))


def test_difference_of_two_records(tmp_path: Path) -> None:
    before, after = {}, {}
    for record, operator, weight, note in ((before, "Relu", 1.0, "a"), (after, "Sigmoid", 2.0, "b")):
        body = f"g (float[1] x) => (float[1] y) {{ m = Mul(x, w) y = {operator}(m) }}"
        onnx.save(proto(body, {"w": np.array([weight], np.float32)}), tmp_path / "int8.onnx")
        (tmp_path / "report.json").write_text(json.dumps({"notes": [note], "same": 1}), "utf-8")
        record.update({file.name: artifacts.describe(file) for file in artifacts.files(tmp_path)})
    after["new.bin"] = {"sha256": ""}
    assert list(artifacts.differences(before, before)) == []
    assert list(artifacts.differences(before, after)) == [
        "int8.onnx: differs",
        "    operators: Relu 1 to 0, Sigmoid 0 to 1",
        "    initializers changed: 1, such as w",
        "new.bin: new",
        "report.json: differs",
        "    values changed: 1, such as /notes/0",
    ]


def test_compat() -> None:
    check("compat.txt", "\n".join(interface.compat_names()))
