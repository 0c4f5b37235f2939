"""Run the commands of the pages of docs/with, as printed, with the real tools; `scripts/with-tools` does it.

EDGEQ_TEST_TOOLS names a folder with one environment for each page. If an environment is missing, the `pip install` line
of the page fills it, from a package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import REPOSITORY, blocks, installation, pages
from tests.docs.stand_ins import STAND_INS

TOOLS = os.environ.get("EDGEQ_TEST_TOOLS")
PAGES = {page.stem: page for page in pages() if installation(page)}
NUMBER = re.compile(r"[-−]?\d+(\.\d+)?")

pytestmark = pytest.mark.slow


def shell(text: str, folder: Path, environment: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run a block in a folder, with the commands of an environment, this checkout of edgeq and further `paths`."""
    own = {
        "PATH": os.pathsep.join((str(environment / "bin"), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, REPOSITORY, REPOSITORY / "targets" / "runtime"))),
        "COLUMNS": "120",
        # Tests report nothing to the makers of the tools.
        **dict.fromkeys(("OLIVE_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY", "YOLO_OFFLINE"), "1"),
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1800,
    )


def environment_of(page: Path) -> Path:
    """Return the page's environment, which pip fills if it was not filled by the same line."""
    assert TOOLS is not None
    environment, line = Path(TOOLS, page.stem).resolve(), installation(page)
    assert line is not None
    stamp = environment / "installed"
    if not (stamp.is_file() and stamp.read_text("utf-8") == line):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        done = shell(line, REPOSITORY, environment)
        if done.returncode:
            pytest.skip(f"pip could not install the tools of this page: {done.stdout.strip().splitlines()[-1]}")
        stamp.write_text(line, "utf-8")
    return environment


def provide(folder: Path, text: str, environment: Path) -> None:
    """Write the stand-ins that a block names. The images come without a preprocessing: edgeq has to find it."""
    if "model=best.pt" in text:
        done = shell(f"python {Path(__file__).with_name('random_yolo.py')}", folder, environment)
        assert done.returncode == 0, done.stdout
    for name in sorted(set(re.findall(r"(?<![\w/])(photos|val|model\.onnx|calibration\.npz)\b", text))):
        if not (folder / name).exists():
            STAND_INS[name](folder)
    for path in folder.glob("*/preprocess.toml"):
        path.unlink()


def shape(line: str) -> str:
    """Return a line of output without its numbers, which differ from run to run, and with single spaces."""
    return " ".join(NUMBER.sub("0", line).split())


@pytest.mark.skipif(TOOLS is None, reason="installs other tools: type scripts/with-tools")
@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_works_with_its_tools(name: str, tmp_path: Path) -> None:
    """Each block succeeds, and the block of output after it shows lines that it printed."""
    environment, printed = environment_of(PAGES[name]), ""
    for block in blocks(PAGES[name]):
        if block.file:
            (tmp_path / block.file).write_text(block.text, "utf-8")
        elif block.language == "sh" and not block.text.startswith("pip install "):
            provide(tmp_path, block.text, environment)
            done = shell(block.text, tmp_path, environment)
            assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}"
            printed = done.stdout
        elif block.language == "text":
            there = {shape(line) for line in printed.splitlines()}
            shown = [line for line in block.text.splitlines() if line.strip() not in ("", "…")]
            missing = [line for line in shown if shape(line) not in there]
            assert not missing, f"{block.page}:{block.line}: {missing} are not in\n{printed}"


def test_the_commands_of_the_workflow_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is the bundle of the same job: two other bundles would be timed for a minute on a busy machine."""
    page = REPOSITORY / "docs" / "with" / "github-actions.md"
    workflow, limits = (b.text for b in blocks(page) if b.text.startswith(("# .github/", "# gate.toml")))
    for name in ("model.onnx", "calib", "val"):
        STAND_INS[name](tmp_path)
    (tmp_path / "gate.toml").write_text(limits, "utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    install, *lines = (step["run"] for step in job["steps"] if "run" in step)
    assert install == "pip install './edgeq-source[cpu]'"
    for line in lines:
        done = shell(line, tmp_path, Path(sys.prefix), Path(__file__).with_name("fast_clock"))
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        if line.startswith("edgeq package"):
            shutil.copyfile(tmp_path / "new.edgeq", tmp_path / "old.edgeq")
    assert "|" in (tmp_path / "summary.md").read_text("utf-8")
    assert (tmp_path / "gate.xml").is_file()
