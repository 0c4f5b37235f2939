"""Run bundles on Python 3.9, the oldest that a device may have, with only numpy and onnxruntime, and in engines.

Methods that are newer than Python 3.9 show only when they run. scripts/lint finds newer modules, functions and
arguments (vermin).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.errors import RuntimeUnavailableError
from edgeq.run.engines import load_engines
from edgeq.run.session import EngineFiles
from tests import fake_engine
from tests.bundle.samples import INPUT, answer, linear, variant

RUNTIME = Path(__file__).parents[2] / "targets" / "runtime"
NAMED = "EDGEQ_PYTHON39"
"""Environment variable that names the interpreter. .ci/run makes an environment for it where it can."""
ENGINES = [name for name, engine in load_engines().items() if engine.module]
QUICK = ("--duration", "0.02", "--queries", "2", "--json")
# Print the reason why an engine cannot be used on that Python, or an empty line.
PROBLEM = """
import onnxruntime
from edgeq_device.engines.catalog import describe_problem, engines
print(describe_problem(engines()[{name!r}], onnxruntime.__version__))
"""
# Run a bundle's program with the fake engine that `values` describes.
WITH_FAKE = """
import sys, json
from pathlib import Path
import onnxruntime
bundle, packages, *arguments = sys.argv[1:]
sys.path[:0] = [bundle, packages]
import edgeq_run
sys.meta_path.insert(0, edgeq_run._Finder(Path(bundle)))
import edgeq_device.engines.catalog, edgeq_device.engines.device
from edgeq_device.cli import run_program
fake = edgeq_device.engines.catalog.read_engine(json.loads({values!r}))
known = {{**edgeq_device.engines.catalog.engines(), "fake": fake}}
edgeq_device.engines.catalog.engines = edgeq_device.engines.device.engines = lambda: known
sys.argv = ["edgeq_run.py", *arguments]
sys.exit(run_program(Path(bundle)))
"""


class Runner:
    """Run a Python 3.9 as a device would: isolated from this process's modules, in a working directory of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self.folder = python, folder
        np.save(folder / "x.npy", INPUT)

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDGEQ_"))}
        words = [self._python, *map(str, arguments)]
        return subprocess.run(words, cwd=self.folder, env=clean, capture_output=True, text=True, timeout=240)

    def right(self, *arguments: object) -> str:
        """Return what a program printed that succeeded without a message."""
        done = self(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def program(self, *arguments: object) -> Any:
        """Return the JSON of a command of the bundle in the folder `b`, which succeeded."""
        return json.loads(self.right(*arguments))

    def runs_all(self, *start: object, name: str) -> None:
        """Check `verify`, `bench` and `infer` of a bundle in which the variant `name` is the best one."""
        statuses = {one["variant"]: one["status"] for one in self.program(*start, "verify", "--json")["variants"]}
        assert statuses[name] == "passed"
        assert set(statuses.values()) == {"passed"}
        bench = self.program(*start, "bench", *QUICK)
        assert not [note for note in bench["notes"] if "measured: " in note or note.startswith("not ")]
        assert bench["models"][name]["memory"]["process_peak_bytes"] > 0
        infer = self.program(*start, "infer", "x.npy", "--json", "--force", "-o", "out.npz")
        assert (infer["variant"], infer["passed_over"]) == (name, [])
        with np.load(self.folder / "out.npz", allow_pickle=False) as outputs:
            np.testing.assert_allclose(outputs["y"], answer(0.0), atol=1e-3)


@pytest.fixture(scope="session")
def python39() -> str:
    """Return a Python 3.9 with numpy and onnxruntime, from where a device's user would have it. Skip without one."""
    named = os.environ.get(NAMED)
    pyenv = (Path.home() / ".pyenv" / "versions").glob("3.9*/bin/python")
    places = [named] if named else [shutil.which("python3.9"), *map(str, sorted(pyenv))]
    check = "import sys; assert sys.version_info[:2] == (3, 9), sys.version; import numpy, onnxruntime"
    reasons = []
    for place in filter(None, places):
        done = subprocess.run([place, "-c", check], capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return place
        lines = done.stderr.strip().splitlines() or ["it does not start"]
        reasons.append(f"{place}: {lines[-1 if lines[0].startswith('Traceback') else 0]}")
    assert not named, f"{NAMED}: {reasons[0]}"
    pytest.skip("; ".join(reasons) or f"no Python 3.9 here: name one with numpy and onnxruntime in {NAMED}")


@pytest.fixture
def device(python39: str, tmp_path: Path) -> Runner:
    return Runner(python39, tmp_path)


def test_every_module_can_be_imported(device: Runner) -> None:
    names = [
        ".".join(path.relative_to(RUNTIME).with_suffix("").parts)
        for path in sorted((RUNTIME / "edgeq_device").rglob("[!_]*.py"))
    ]
    assert len(names) > 20
    code = f"import sys; sys.path[:0] = [{str(RUNTIME)!r}]; import edgeq_guest, edgeq_board, {', '.join(names)}"
    device.right("-B", "-W", "error", "-c", code)


@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
def test_a_bundle_runs(device: Runner, archive: bool) -> None:
    place = "b.edgeq" if archive else "b"
    spec = BundleSpec("linear", (variant("own", linear(device.folder / "m.onnx", 0.0, external="weights.bin"), 0.0),))
    write_bundle(spec, device.folder / place)
    device.runs_all(place if archive else "b/edgeq_run.py", name="own")


def test_a_program_runs_it(device: Runner) -> None:
    spec = BundleSpec("linear", (variant("own", linear(device.folder / "m.onnx", 0.0), 0.0),))
    write_bundle(spec, device.folder / "b")
    code = "import sys; sys.path[:0] = ['b']; import numpy; from edgeq_run import open_bundle\n"
    code += "with open_bundle() as model: numpy.save('y.npy', model.run(numpy.load('x.npy'))['y'])"
    device.right("-c", code)
    np.testing.assert_allclose(np.load(device.folder / "y.npy"), answer(0.0), atol=1e-3)


def with_engine(folder: Path, name: str, provider: str, model: Path | None = None) -> BundleSpec:
    """Return a bundle whose best variant runs in an engine, from `model` if the engine has a format of its own."""
    own = linear(folder / "m.onnx", 0.0, external="weights.bin")
    info = {"rank": 1, "precision": "f32", "threads": 1}
    return BundleSpec("linear", (variant("own", own, 0.0), variant(name, model or own, 0.0, ep=provider, info=info)))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("archive", [False, True], ids=["folder", "archive"])
def test_an_engine_runs_its_variant(device: Runner, name: str, archive: bool) -> None:
    code = f"import sys; sys.path[:0] = [{str(RUNTIME)!r}]\n{PROBLEM.format(name=name)}"
    problem = device.right("-B", "-c", code).strip()
    if problem:
        pytest.skip(f"on Python 3.9: {problem}")
    engine, place = load_engines()[name], "b.edgeq" if archive else "b"
    try:
        model = EngineFiles(device.folder).convert_once(linear(device.folder / "m" / "m.onnx", 0.0), engine)
    except RuntimeUnavailableError as error:
        pytest.skip(f"no {engine.suffix} file can be made here: {error}")
    write_bundle(with_engine(device.folder, "best", engine.provider, model), device.folder / place)
    device.runs_all(place if archive else "b/edgeq_run.py", name="best")


@pytest.mark.parametrize("install", [fake_engine.install, fake_engine.install_direct], ids=["plug-in", "package"])
def test_both_forms_of_an_engine_start(device: Runner, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No release of onnxruntime for Python 3.9 registers plug-ins, so a fake takes their place."""
    packages = device.folder / "packages"
    packages.mkdir()
    engine = install(packages, monkeypatch)
    values = json.dumps({**engine.to_dict(), "min_onnxruntime": "1.17"})
    write_bundle(with_engine(device.folder, "best", engine.provider), device.folder / "b")
    device.runs_all("-c", WITH_FAKE.format(values=values), "b", packages, name="best")
