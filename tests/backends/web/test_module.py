"""Test the page's module in node: which files it reads, what it makes of names, and how long it measures."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.engines.node_package import load_pins

from edgeq.backends.web.folder import MANIFEST, write_module

from .runtime import in_node

EVIL = b"import fs from 'node:fs'; fs.writeFileSync(`${process.env.HERE}/ran`, '');"


@pytest.fixture
def module(tmp_path: Path) -> Path:
    if shutil.which("node") is None:
        pytest.skip("no node here")
    folder = tmp_path / "site"
    folder.mkdir()
    return write_module(folder)


def problem_of_load(module: Path, manifest: dict[str, Any]) -> str:
    """Return the message with which `load` refuses the module's folder."""
    (module.parent / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    script = """
        const { load } = await import(process.argv[1]);
        const problem = await load(new URL("./", process.argv[1])).then(() => "none", (error) => error.message);
        console.log(JSON.stringify(problem));
    """
    problem: str = in_node(script, module.as_uri())
    return problem


def listed(path: str, content: bytes) -> dict[str, Any]:
    return {"path": path, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_contains_the_pins_of_the_runtime(module: Path) -> None:
    script = "const { PINNED } = await import(process.argv[1]); console.log(JSON.stringify(PINNED));"
    assert in_node(script, module.as_uri()) == load_pins()


def test_loads_no_code_that_the_folder_lists(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", str(module.parent))
    files = []
    for name in ("a.mjs", "b.mjs", "c.wasm"):
        (module.parent / name).write_bytes(EVIL)
        files.append(listed(name, EVIL))
    (module.parent / "selftest.bin").write_bytes(b"")
    manifest = {
        "package": "evil",
        "runtimes": {"wasm": files},
        "model": [files[0]],
        "session": {},
        "selftest": {**listed("selftest.bin", b""), "cases": []},
    }
    assert "onnxruntime-web" in problem_of_load(module, manifest), "only the pinned files are looked for"
    assert not (module.parent / "ran").exists()


INSIDE = ["result", "deep/result", "100%.bin", "%2e%2e/result", "a%2f..%2f..%2fresult", "https:", "result?a=1#b", "a b"]
OUTSIDE = [
    *("../result", "a/../../result", "./../result", "/etc/passwd", "//other/result", "https://other/result"),
    *("..\\result", ".\t./result", "\n../result", ""),
]


@pytest.mark.parametrize("base", ["file:///srv/site/", "https://host/a/site/"])
def test_paths_stay_below_the_folder(module: Path, base: str) -> None:
    script = """
        const { below } = await import(process.argv[1]);
        const place = (path) => {
          try { return below(process.argv[2], path).href; } catch (error) { return error.message; }
        };
        console.log(JSON.stringify(JSON.parse(process.argv[3]).map(place)));
    """
    verdicts = in_node(script, module.as_uri(), base, json.dumps([*INSIDE, *OUTSIDE]))
    for url in verdicts[: len(INSIDE)]:
        assert url.startswith(base)
        assert not {"..", "%2e%2e", ".", ""} & set(url.removeprefix(base).lower().split("/"))
        assert not {"?", "#"} & set(url)
    assert all("leads out of the folder" in problem for problem in verdicts[len(INSIDE) :])


def test_a_name_such_as_proto_changes_no_other_object(module: Path) -> None:
    script = """
        const { sessionOptions } = await import(process.argv[1]);
        const config = JSON.parse('{"__proto__.a": "1", "session.__proto__.b": "2", "constructor.prototype.c": "3"}');
        sessionOptions({ config });
        console.log(JSON.stringify([({}).a ?? null, ({}).b ?? null, ({}).c ?? null]));
    """
    assert in_node(script, module.as_uri()) == [None, None, None]


@pytest.mark.parametrize("name", ["__proto__", "constructor", "toString"])
def test_refuses_a_name_that_every_object_has(module: Path, name: str) -> None:
    script = """
        const { prepare, runtimeFiles } = await import(process.argv[1]);
        const name = process.argv[2];
        const item = { type: "uint8", shape: [1], data: new Uint8Array(1) };
        const model = (type, op) => ({ manifest: { preprocessing: { input: "x", type, steps: op ? [{ op }] : [] } } });
        const problems = [];
        const models = [model(name), model("uint8", name)];
        for (const call of [() => runtimeFiles(name), ...models.map((one) => () => prepare(one, item))]) {
          try { call(); problems.push("none"); } catch (error) { problems.push(error.message); }
        }
        console.log(JSON.stringify(problems));
    """
    assert all("Choose from" in problem for problem in in_node(script, module.as_uri(), name))


@pytest.mark.parametrize("seconds", ["Infinity", "1e9", "'1e9'", "NaN"])
def test_measures_for_a_minute_at_most(module: Path, seconds: str) -> None:
    script = f"""
        const {{ bench }} = await import(process.argv[1]);
        let now = 0;
        performance.now = () => (now += 50);  // a fast clock
        const ort = {{ Tensor: class {{}}, env: {{ wasm: {{ numThreads: 1 }} }} }};
        const model = {{ ort, session: {{ run: async () => {{}} }}, cases: [{{ inputs: {{}} }}], timings: {{}} }};
        await bench(model, {{ seconds: {seconds} }});
        console.log(JSON.stringify(now));
    """
    assert in_node(script, module.as_uri()) < 120_000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_refuses_a_file_without_an_end(module: Path, kind: str) -> None:
    place = module.parent / "selftest.bin"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.write_bytes(bytes(100))
    manifest = {"model": [], "session": {}, "selftest": {**listed("selftest.bin", b"1234"), "cases": []}}
    assert ("more than 4 bytes" if kind == "long" else "not a regular file") in problem_of_load(module, manifest)
