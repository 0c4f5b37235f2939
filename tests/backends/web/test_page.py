"""Test the page in Chromium: the check of every file before anything runs, the self-test, the figures, and refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx
import pytest
from edgeq_device.answers.head import Head
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import edgeq
from edgeq import demo
from edgeq.backends.base import Artifact
from edgeq.backends.web.folder import write_folder
from edgeq.data.samples import open_samples
from edgeq.model.load import model_signature
from edgeq.run.engines import EngineChoice
from edgeq.scheme import Scheme
from tests.docs.blocks import REPOSITORY, blocks
from tests.reporting.browser import Page, browsing, find_browser

from .runtime import ISOLATED, WASM, in_node, need_runtime, served, with_runtime

SWIFTSHADER = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan",
    "--use-vulkan=swiftshader",
)
_FILES = ("model.onnx", "selftest.bin", "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with browsing(program, "--host-resolver-rules=MAP web.test 127.0.0.1") as page:
        yield page


def report_of(browser: Page, url: str) -> Any:
    browser.requests.clear()
    browser.problems.clear()
    browser.navigate(url)
    deadline = time.monotonic() + 60
    while not browser.evaluate("Boolean(window.report)"):
        assert time.monotonic() < deadline, browser.evaluate("document.body.textContent")
        time.sleep(0.02)
    return browser.evaluate("window.report")


def test_an_isolated_page_passes_and_measures_several_threads(browser: Page, site: Path) -> None:
    with served(site) as (port, posted):
        report = report_of(browser, f"http://127.0.0.1:{port}/?seconds=0.01&post=result")
        assert browser.problems == []
        assert report["selftest"]["passed"]
        assert all(check["equal"] == check["values"] > 0 for check in report["selftest"]["checks"])
        assert [url for url in browser.requests if url.startswith("blob:")], "the code that was checked"
        assert report["page"]["isolated"]
        assert [figure["threads"] for figure in report["figures"]] == [1, 2, 4]
        for figure in report["figures"]:
            assert 0 < figure["p50_ms"] <= figure["p90_ms"] <= figure["p99_ms"]
            assert figure["samples"] >= 30
            assert figure["warm_up_runs"] >= 20
        assert "Passed" in browser.evaluate("document.querySelector('#state').textContent")
        assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {f"127.0.0.1:{port}"}
        deadline = time.monotonic() + 10
        while not posted and time.monotonic() < deadline:
            time.sleep(0.02)
        assert posted == [report]


@pytest.mark.parametrize("place", ["../result", "/result", "//127.0.0.1/result", "%2e%2e/result"])
def test_posts_only_below_its_own_folder(browser: Page, site: Path, place: str) -> None:
    with served(site.parent) as (port, posted):
        report_of(browser, f"http://127.0.0.1:{port}/{site.name}/?seconds=0&post={quote(place, safe='')}")
        browser.evaluate("new Promise((done) => setTimeout(done, 300))")
        paths = [url for url in browser.requests if url.endswith("/result")]
    assert all(url.startswith(f"http://127.0.0.1:{port}/{site.name}/") for url in paths), paths
    assert len(posted) == len(paths)


def test_a_policy_keeps_other_code_and_other_hosts_out(browser: Page, site: Path) -> None:
    with served(site) as (port, _):
        report_of(browser, f"http://127.0.0.1:{port}/?seconds=0")
        refused = browser.evaluate(f"""(async () => {{
            const found = [];
            document.addEventListener("securitypolicyviolation", (one) => found.push(one.effectiveDirective));
            await fetch("http://localhost:{port}/edgeq-web.json", {{ mode: "no-cors" }}).catch(() => null);
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            await new Promise((done) => setTimeout(done, 100));
            return [found.sort(), Boolean(window.ran)];
        }})()""")
    assert refused == [["connect-src", "script-src-elem"], False]


def test_a_page_that_is_not_isolated_measures_one_thread(browser: Page, site: Path) -> None:
    with served(site, {}) as (port, _):
        report = report_of(browser, f"http://127.0.0.1:{port}/?seconds=0.01")
    assert report["selftest"]["passed"]
    assert [figure["threads"] for figure in report["figures"]] == [1]


@pytest.mark.parametrize("name", _FILES)
def test_a_wrong_byte_is_refused_before_anything_runs(browser: Page, site: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(site, tmp_path / "site", symlinks=True, ignore=shutil.ignore_patterns("node_modules"))
    dist = tmp_path / "site" / "node_modules" / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    for file in _FILES[2:]:
        (dist / file).symlink_to((site / "node_modules" / "onnxruntime-web" / "dist" / file).resolve())
    wrong = next((tmp_path / "site").rglob(name))
    content = bytearray(wrong.read_bytes())
    content[len(content) // 2] ^= 1
    wrong.unlink()
    wrong.write_bytes(content)
    with served(tmp_path / "site") as (port, _):
        report = report_of(browser, f"http://127.0.0.1:{port}/")
    assert f"{name} has the SHA-256" in report["error"]
    assert "selftest" not in report
    assert not [url for url in browser.requests if url.startswith("blob:")], "code was loaded"


def test_without_a_secure_origin_nothing_is_read(browser: Page, site: Path) -> None:
    with served(site) as (port, _):
        report = report_of(browser, f"http://web.test:{port}/")
    assert "no crypto.subtle" in report["error"]
    assert not report["page"]["secure"]
    requests = {url.rpartition("/")[2] for url in browser.requests if url.startswith("http")}
    assert requests == {"", *(f"{name}.mjs" for name in ("edgeq", "page", "answer", "decode", "draw")), "page.css"}


LABELS = ("<img src=x onerror='window.ran=true'>", "dog")
GIVE = """(async () => {
    const name = "photo.png";
    const content = await (await fetch(name)).blob();
    const files = new DataTransfer();
    files.items.add(new File([content], name, { type: "image/png" }));
    const input = document.querySelector("#file");
    input.files = files.files;
    input.dispatchEvent(new Event("change"));
    while (!document.querySelector("#time").textContent) await new Promise((done) => setTimeout(done, 20));
})()"""


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder of a model that finds two objects in every picture, whatever it shows."""
    need_runtime()
    folder = tmp_path_factory.mktemp("detector")
    rows = np.zeros((1, 6, 20), np.float32)
    rows[0, :, 3], rows[0, :, 9] = (32, 32, 20, 10, 0.9, 0), (16, 40, 8, 8, 0, 0.4)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Add", ["objects", "nothing"], ["rows"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "detector",
        [value("x", TensorProto.FLOAT, [1, 3, 64, 64])],
        [value("rows", TensorProto.FLOAT, [1, 6, 20])],
        [numpy_helper.from_array(rows, "objects"), numpy_helper.from_array(np.float32(0), "zero")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    (folder / "data").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 120, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "data" / "photo.png")
    head = Head("yolov8", {"rows": "rows"}, {"unit": "pixel"}, labels=LABELS)
    artifact = Artifact(
        folder / "model.onnx",
        Scheme(mode="float"),
        "CPUExecutionProvider",
        engine=EngineChoice(WASM),
        head=head,
        title="my <b>detector</b>",
    )
    samples = open_samples(folder / "data", model_signature(folder / "model.onnx"), preprocess="yolo")
    write_folder(artifact, samples, folder / "site", count=1)
    shutil.copyfile(folder / "data" / "photo.png", folder / "site" / "photo.png")
    return with_runtime(folder / "site")


@pytest.mark.parametrize("width", [390, 1280])
def test_shows_the_answer_for_a_picture(browser: Page, detector: Path, width: int) -> None:
    text = "document.querySelector('#{}').textContent"
    with served(detector) as (port, _):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        report_of(browser, f"http://127.0.0.1:{port}/")
        browser.evaluate(GIVE)
        names = browser.evaluate("[...document.querySelectorAll('#found .name')].map((one) => one.textContent)")
        places = browser.evaluate("document.querySelector('#found .more').textContent")
        title, summary = browser.evaluate("document.title"), browser.evaluate(text.format("summary"))
        described = browser.evaluate("document.querySelector('#canvas').getAttribute('aria-label')")
        browser.evaluate("(threshold.value = 0.5, threshold.dispatchEvent(new Event('input')))")
        above = browser.evaluate("document.querySelectorAll('#found .name').length")
        wide, ran = browser.evaluate("[document.documentElement.scrollWidth, Boolean(window.ran)]")
        hosts = {url.split("/")[2] for url in browser.requests if url.startswith("http")}
    assert (title, names) == ("my <b>detector</b>", list(LABELS))
    # The letterbox of 120 x 60 pixels in 64 x 64 has the scale 64 / 120 and 16 rows of padding above.
    assert (
        places == f"{round(22 * 120 / 64)}, {round(11 * 120 / 64)} – {round(42 * 120 / 64)}, {round(21 * 120 / 64)} px"
    )
    assert summary == described == ", ".join(LABELS)
    assert above == 1
    assert wide <= width
    assert not ran
    assert browser.problems == []
    assert hosts == {f"127.0.0.1:{port}"}


def test_shows_the_outputs_of_an_unknown_head(browser: Page, detector: Path, tmp_path: Path) -> None:
    shutil.copytree(detector, tmp_path / "site", symlinks=True)
    manifest = tmp_path / "site" / "edgeq-web.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"family": "yolov8"', '"family": "nanodet"'), "utf-8")
    with served(tmp_path / "site") as (port, _):
        report_of(browser, f"http://127.0.0.1:{port}/")
        browser.evaluate(GIVE)
        found = browser.evaluate("document.querySelector('#panel').textContent")
    assert "does not decode the family nanodet" in found
    assert "float32 [1,6,20]" in found


def test_node_runs_the_same_module(site: Path) -> None:
    script = """
        const { bench, close, load, verify } = await import(process.argv[1]);
        const model = await load(new URL("./", process.argv[1]));
        const found = { verified: await verify(model), figures: await bench(model, { seconds: 0.01 }) };
        await close(model);
        console.log(JSON.stringify(found));
    """
    answer = in_node(script, (site / "edgeq.mjs").as_uri())
    assert answer["verified"]["passed"]
    assert 0 < answer["figures"]["p50_ms"] <= answer["figures"]["p99_ms"]


def test_the_bundle_passes_beside_another_target_that_shares_its_weights(site: Path) -> None:
    report = edgeq.verify(site.with_name("web-bundle"), variant="web-wasm").to_dict()
    (checked,) = (variant for variant in report["variants"] if variant["variant"] == "web-wasm")
    assert checked["status"] == "passed"
    assert {output["max_abs_error"] for output in checked["outputs"].values()} == {0.0}


def test_a_path_that_leads_out_is_refused(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site, tmp_path / "site", symlinks=True)
    manifest = tmp_path / "site" / "edgeq-web.json"
    manifest.write_text(manifest.read_text("utf-8").replace('"model.onnx"', '"../model.onnx"'), "utf-8")
    script = """
        const { load } = await import(process.argv[1]);
        const problem = await load(new URL("./", process.argv[1])).catch((error) => error.message);
        console.log(JSON.stringify(problem));
    """
    assert "leads out of the folder" in in_node(script, (tmp_path / "site" / "edgeq.mjs").as_uri())


def test_javascript_of_the_docs_parses(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node here")
    scripts = [block.text for block in blocks(REPOSITORY / "docs" / "web.md") if block.language == "js"]
    assert scripts
    for text in scripts:
        (tmp_path / "shown.mjs").write_text(text, "utf-8")
        subprocess.run(["node", "--check", str(tmp_path / "shown.mjs")], check=True, timeout=60)


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_webgpu_follows_the_stored_answers(site: Path, tmp_path: Path, precision: str) -> None:
    if os.environ.get("EDGEQ_TEST_WEBGPU") != "1":
        pytest.skip("a software GPU takes 15 s: EDGEQ_TEST_WEBGPU=1 runs it")
    program = find_browser()
    if program is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    if precision == "float32":
        artifact = Artifact(demo.MODEL, Scheme(mode="float"), "CPUExecutionProvider", engine=EngineChoice(WASM))
        samples = open_samples(demo.CALIBRATION, model_signature(demo.MODEL))
        write_folder(artifact, samples, tmp_path / "float", count=2)
        site = with_runtime(tmp_path / "float")
    with browsing(program, *SWIFTSHADER) as page, served(site, ISOLATED) as (port, _):
        report = report_of(page, f"http://127.0.0.1:{port}/?provider=webgpu&seconds=0")
    assert report["selftest"]["passed"], report
    assert "figures" not in report
    if precision == "float32":
        assert all(check["largest"] < 1e-3 for check in report["selftest"]["checks"])
