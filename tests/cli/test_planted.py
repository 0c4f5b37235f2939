"""Test that Python files in a working directory, next to a model or inside a bundle are never imported."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from edgeq_device.engines.guest import build_python_command, list_import_path
from edgeq_device.engines.node import find_or_start_node
from edgeq_device.engines.node_package import package_problem
from edgeq_device.errors import DeviceError
from edgeq_device.system.programs import build_child_environment, find_program

from edgeq.backends.base import toolkits
from edgeq.backends.litert.ethosu import find_vela
from edgeq.bundle.spec import BundleSpec
from edgeq.bundle.write import write_bundle
from edgeq.cli import COMMANDS, group
from edgeq.emulate.emulator import load_emulators
from edgeq.emulate.machine import find_qemu
from edgeq.errors import EdgeqError
from edgeq.remote.devices import find_board
from edgeq.remote.link import Link
from edgeq.run import toolkit
from edgeq.run.engines import load_engines
from tests.bundle.samples import INPUT, linear, variant
from tests.cli.process import REPOSITORY
from tests.cli.workspace import fill

RUNNER = REPOSITORY / "targets" / "runtime"
# Modules that Python loads before it searches the working directory (os, codecs ...) cannot be replaced from there.
NAMES = (
    "argparse", "click", "coloredlogs", "cpuinfo", "cryptography", "dataclasses", "edgeq_device", "flatbuffers",
    "hashlib", "inspect", "json", "multiprocessing", "numpy", "onnx", "onnxruntime", "packaging", "pathlib", "PIL",
    "pip", "platform", "rich", "runpy", "signal", "sklearn", "socket", "subprocess", "sympy", "tempfile", "tomllib",
    "typing_extensions", "webbrowser", "yaml", "zipfile",
)  # fmt: skip
BENCH = ("--duration", "0", "--queries", "2")
DATA = ("--data", "x.npz")
EVAL = ("bundle", *DATA, "--reference", "net.onnx")

# For every command of edgeq: its arguments. Each runs once with hostile modules.
CASES: dict[str, list[tuple[str, ...]]] = {
    "detect": [()],
    "profiles": [()],
    "targets": [()],
    "toolkit": [()],
    "inspect": [("net.onnx",)],
    "calibrate": [("net.onnx", *DATA, "-o", "stats"), ("net.onnx", *DATA, "-o", "stats", "--workers", "1")],
    "tune": [("net.onnx", *DATA, "--budget", "5s", "-o", "tuned")],
    "quantize": [("net.onnx", *DATA, "--no-timing", "-o", "int8.onnx")],
    "retarget": [("bundle/models/model/v/model.onnx", "-o", "other.onnx")],
    "package": [("net.onnx", *DATA, "--no-timing", "-o", "new")],
    "emit-c": [("array.onnx", *DATA, "-o", "c")],
    "verify": [("bundle",), ("bundle.edgeq",), ("bundle", "--on", "all")],
    "sign": [("bundle", "--key", "key.pem"), ("bundle.edgeq", "--key", "key.pem")],
    "push": [("bundle", "127.0.0.1:1/net")],
    "pull": [(f"127.0.0.1:1/net@sha256:{'0' * 64}", "-o", "pulled")],
    "emulate": [("status",)],
    "bench": [("net.onnx", *BENCH), ("bundle", *BENCH, "--json"), ("bundle.edgeq", *BENCH, "--json")],
    "audit": [("net.onnx", *DATA)],
    "debug": [("net.onnx", "quantized.onnx", *DATA)],
    "eval": [(*EVAL,), (*EVAL, "--workers", "2")],
    "infer": [("net.onnx", "input.npy", "--raw", "outputs.npz"), ("bundle", "input.npy", "--raw", "outputs.npz")],
    "compare": [("net.onnx", "bundle", *DATA, "--duration", "0.01")],
    "gate": [("net.onnx", "--baseline", "net.onnx")],
    "report": [("bundle", "--bench")],
    "preprocess": [("list",)],
    "run": [("recipe.toml",)],
    "extensions": [()],
    "doctor": [()],
    "device": [("list",)],
    "demo": [("-o", "demo")],
}
# Used only in this test.
KEY = """-----BEGIN EC PRIVATE KEY-----
MHcCAQEEICkhi17shRw4aFm4v5yp1dR4wz5XuY6ytLFmN0VIktF9oAoGCCqGSM49
AwEHoUQDQgAE02l1G45vX2MoG2GqlCx6JKDy5rAiYd5H/ZFArBv30DSMvyQcTZQU
+M54539fHA42hc3QLq6dM+n5lmChwcs4xw==
-----END EC PRIVATE KEY-----
"""
SLOW = {"demo", "tune", "package", "quantize", "report"}
DOCUMENTED = {0, *(kind.exit_code for kind in (EdgeqError, *EdgeqError.__subclasses__())), 2}


def plant(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """Write modules and packages that leave a mark and end the process when they are imported."""
    folder.mkdir(exist_ok=True)
    for name in names:
        code = f"open({str(folder / 'IMPORTED')!r}, 'a').write({name!r} + chr(10))\nraise SystemExit({name!r})\n"
        place = folder / name / "__init__.py" if name in ("edgeq_device", "numpy") else folder / f"{name}.py"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            place.write_text(code)


def imported(*folders: Path) -> list[str]:
    return [f"{m.parent.name}: {m.read_text()}" for f in folders for m in f.rglob("IMPORTED")]


def environment(*path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path:
        kept["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1"}


def run(words: list[str | Path], cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(*path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def program(folder: Path) -> Path:
    """Write the program that pip installs as `edgeq`.

    `python -P` would not test the same: children of multiprocessing inherit it and then need no protection by edgeq.
    """
    made = folder / "bin" / "edgeq"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text("import sys\nfrom edgeq.__main__ import main\nsys.exit(main())\n")
    return made


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a folder that is in use")
def test_a_working_directory_that_has_been_removed(tmp_path: Path) -> None:
    script = 'cd gone && rmdir ../gone && exec "$0" -m edgeq --version'
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable],
        cwd=tmp_path,
        env=environment(REPOSITORY, RUNNER),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models, data, and a bundle as a directory and as a zip."""
    folder = tmp_path_factory.mktemp("planted")
    fill(folder)
    model = linear(folder / "linear" / "m.onnx", 0.0)
    spec = BundleSpec("x", (variant("v", model, 0.0),), float_model=model)
    write_bundle(spec, folder / "bundle")
    write_bundle(spec, folder / "bundle.edgeq")
    np.save(folder / "input.npy", INPUT)
    (folder / "key.pem").write_text(KEY)
    (folder / "recipe.toml").write_text('[inspect]\nmodel = "net.onnx"\n')
    for name, options in (("quantized.onnx", ()), ("array.onnx", ("--profile", "gemmini"))):
        data, output = ("--data", str(folder / "x.npz")), ("-o", str(folder / name))
        words = ["quantize", str(folder / "net.onnx"), *data, *options, "--no-timing", *output]
        done = CliRunner().invoke(group, words, prog_name="edgeq")
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "place"))


def cases() -> list[object]:
    listed = [(name, words) for name, several in CASES.items() for words in several]
    return [
        pytest.param(
            name,
            words,
            id=" ".join((name, *words[:2])),
            marks=[pytest.mark.slow] if name in SLOW or "--on" in words else [],
        )
        for name, words in listed
    ]


def test_every_command_has_a_case() -> None:
    assert CASES.keys() == COMMANDS.keys()
    assert all(CASES.values())


@pytest.mark.parametrize(("name", "words"), cases())
def test_commands_import_nothing_from_the_working_directory(name: str, words: tuple[str, ...], place: Path) -> None:
    plant(place)
    done = run([program(place), name, *words], place, REPOSITORY, RUNNER)
    assert imported(place) == []
    assert done.returncode in DOCUMENTED, done.stderr
    assert "Traceback" not in done.stderr
    # A case whose arguments no longer work would test nothing.
    assert done.returncode != 2, done.stderr
    if name == "bench" and words[-1] == "--json":  # bench measures memory in a process of its own
        models = json.loads(done.stdout)["models"]
        assert all(model["memory"]["process_peak_bytes"] > 0 for model in models.values()), done.stdout[:500]


@pytest.mark.parametrize("words", [("bench", "net.onnx", *BENCH), ("verify", "bundle"), ("inspect", "net.onnx")])
def test_python_m_edgeq_drops_the_working_directory(words: tuple[str, ...], place: Path) -> None:
    """`python -m edgeq` imports nothing from the working directory, even without -P.

    edgeq cannot protect the imports that Python makes before edgeq runs.
    """
    plant(place)
    done = run(["-m", "edgeq", *words], place, REPOSITORY, RUNNER)
    assert imported(place) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [("bench", ".", *BENCH), ("verify", "."), ("bench", "bundle.edgeq", *BENCH)])
def test_a_bundle_with_more_files_is_refused_before_they_run(words: tuple[str, ...], place: Path) -> None:
    """An altered runner inside a bundle never runs: `edgeq bench .` and `edgeq verify .` refuse the bundle."""
    cwd = place / "bundle" if words[1] == "." else place
    plant(place / "bundle")
    with zipfile.ZipFile(place / "bundle/edgeq_device.zip", "w") as archive:
        archive.writestr("edgeq_device/engines/memory.py", f"open({str(place / 'IMPORTED')!r}, 'w').write('altered')")
    done = run([program(place), *words], cwd, REPOSITORY, RUNNER)
    assert imported(place) == []
    assert done.returncode == (7 if words[1] == "." else 0), done.stderr


RUNS = [("info",), ("verify",), ("bench", *BENCH), ("infer", "input.npy", "-o", "out.npz")]
HOW = {
    "script": ["bundle/edgeq_run.py"],
    "isolated script": ["-I", "bundle/edgeq_run.py"],
    "directory": ["bundle"],
    "zip": ["bundle.edgeq"],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("words", RUNS, ids=[words[0] for words in RUNS])
def test_the_runner_imports_nothing_from_the_working_directory(
    how: str, words: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    """The runner imports neither planted modules nor an installed package with its own package's name."""
    site = tmp_path / "site"
    site.mkdir()
    plant(site, ("edgeq_device",))
    plant(place)
    done = run([*HOW[how], *words, "--json"], place, site)
    assert imported(place, site) == []
    assert done.returncode == 0, done.stderr
    if words[0] == "bench":
        assert "could not be measured" not in done.stdout
        assert '"process_peak_bytes"' in done.stdout


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("words", RUNS, ids=[words[0] for words in RUNS])
def test_the_runner_imports_nothing_that_was_put_into_its_bundle(how: str, words: tuple[str, ...], place: Path) -> None:
    # For a directory or a zip, Python imports runpy and its dependencies before the first line of the bundle runs.
    names = tuple(name for name in NAMES if name not in ("edgeq_device", "runpy", "zipfile"))
    plant(place / "bundle", names)
    with zipfile.ZipFile(place / "bundle.edgeq", "a") as archive:
        for name in names:
            archive.writestr(f"{name}.py", f"open({str(place / 'IMPORTED')!r}, 'a').write({name!r})\n")
    done = run([*HOW[how], *words], place)
    assert imported(place) == []
    assert done.returncode == 7, done.stderr
    assert "is not in the manifest" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["cli.abi3.so", "cli.pyc", "__pycache__/cli.{tag}.pyc", "cli/__init__.py"])
def test_the_runner_takes_its_sources_only(name: str, place: Path) -> None:
    """The runner uses only its zip, never a planted folder or compiled file, which Python would import first."""
    import importlib.util

    planted = place / "bundle/edgeq_device" / name.format(tag=sys.implementation.cache_tag)
    planted.parent.mkdir(parents=True)
    code = compile(f"open({str(place / 'IMPORTED')!r}, 'w').write('compiled')\n", "cli.py", "exec")
    if planted.suffix == ".py":
        planted.write_text(f"open({str(place / 'IMPORTED')!r}, 'w').write('a package')\n")
    elif planted.suffix == ".pyc":
        import marshal

        # "Unchecked" means that Python uses the file without a look at the source.
        header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
        planted.write_bytes(header + marshal.dumps(code))
    else:
        planted.write_bytes(b"no library")
    done = run(["bundle/edgeq_run.py", "verify"], place)
    assert imported(place) == []
    assert done.returncode == 7, done.stderr
    assert "is not in the manifest" in done.stderr


def test_a_runner_without_its_package_says_so(place: Path) -> None:
    (place / "bundle/edgeq_device.zip").unlink()
    done = run(["bundle/edgeq_run.py", "verify"], place)
    assert done.returncode == 7
    assert "edgeq_device.zip is missing" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_runtime_on_the_parents_path_is_the_childs(tmp_path: Path) -> None:
    """A child process uses the parent's absolute folders, because devices keep numpy and onnxruntime there."""
    site, here = tmp_path / "site", tmp_path / "here"
    site.mkdir()
    here.mkdir()
    code = f"import sys; sys.path[:0] = [{str(RUNNER)!r}, {str(site)!r}]; sys.path += ['', {str(here)!r}, 'site']\n"
    code += "from edgeq_device.engines.guest import list_import_path; print(*list_import_path(), sep=chr(10))"
    kept = run(["-P", "-c", code], here).stdout.splitlines()
    assert kept[:2] == [str(RUNNER), str(site)]
    assert not {"", "site", str(here)} & set(kept)


def test_a_child_can_do_what_its_parent_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plant(tmp_path)
    assert str(tmp_path) not in list_import_path()
    words = build_python_command("edgeq_device.engines.memory")
    done = subprocess.run(words, input="{}", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("KeyError")
    assert imported(tmp_path) == []


@pytest.mark.parametrize("path", [":", "{runner}:", ".:{runner}", "lib:{runner}:"])
def test_entries_of_pythonpath_do_not_lead_into_the_working_directory(path: str, place: Path) -> None:
    """`PYTHONPATH=/opt/lib:$PYTHONPATH` ends with an empty entry, which Python reads as the working directory."""
    plant(place)
    plant(place / "lib")
    site = f"{REPOSITORY}:{RUNNER}"
    for words, value in (
        ([program(place), "inspect", "net.onnx"], path.format(runner=site) if "runner" in path else f"{site}:"),
        (["bundle/edgeq_run.py", "info"], path.format(runner=RUNNER)),
    ):
        env = {**environment(), "PYTHONPATH": value}
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=place, env=env, capture_output=True, text=True, check=False
        )
        assert imported(place) == []
        assert done.returncode == 0, done.stderr


PROGRAMS = (
    "as", "apt-cache", "apt-get", "cc", "collect2", "dpkg-deb", "gcc", "ifconfig", "ip", "ld", "ldconfig", "node",
    "nvidia-smi", "objdump", "open", "python3.10", "python3.11", "python3.99", "qemu-aarch64", "qemu-aarch64-static",
    "qemu-x86_64", "sh", "ssh", "sysctl", "tar", "uname", "vela", "xdg-open",
)  # fmt: skip


def plant_programs(folder: Path) -> None:
    """Write programs that leave a mark and fail."""
    folder.mkdir(exist_ok=True)
    for name in PROGRAMS:
        place = folder / name
        place.write_text(f"#!/bin/sh\necho {name} >>{shlex.quote(str(folder / 'IMPORTED'))}\nexit 1\n")
        place.chmod(0o755)


STARTING = [
    ("toolkit",),
    ("doctor",),
    ("detect",),
    ("emulate", "status"),
    ("emulate", "setup"),
    ("bench", "net.onnx", *BENCH, "--engine", "wasm"),
    ("report", "bundle", "--open"),
    ("detect", "--on", "ssh://127.0.0.1:1"),
    ("audit", "net.onnx", *DATA, "-t", "cascade-lake"),
    ("quantize", "net.onnx", *DATA, "-t", "ethos-u55-128", "--no-timing", "-o", "int8.tflite"),
]


@pytest.mark.skipif(os.name != "posix", reason="programs are files with a mode")
@pytest.mark.parametrize("words", STARTING, ids=[" ".join(words[:2]) for words in STARTING])
def test_commands_start_no_program_of_the_working_directory(words: tuple[str, ...], place: Path) -> None:
    plant_programs(place)
    plant_programs(place / "bin")
    # Without its programs, the setup must end before it downloads anything.
    folders = os.environ["PATH"] if words[-1] != "setup" else "/nowhere"
    cache = place / "cache"
    cache.mkdir(mode=0o700)
    env = {
        **environment(REPOSITORY, RUNNER),
        "PATH": f".:bin::{folders}:./bin:",
        "XDG_CACHE_HOME": str(cache),
        "LD_LIBRARY_PATH": "::.",
    }
    done = subprocess.run(
        [sys.executable, str(program(place / "cache")), *words],
        cwd=place,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert imported(place) == [], done.stderr
    assert done.returncode in DOCUMENTED - {1, 2}, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="programs are files with a mode")
def test_only_regular_files_in_absolute_folders_are_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant_programs(tmp_path)
    plant_programs(tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", ":", "bin", "./bin", "../" + tmp_path.name):
        monkeypatch.setenv("PATH", path)
        assert find_program("cc") is None
        assert find_program("cc", "bin") is None
        assert find_program("cc", tmp_path / "bin") == str(tmp_path / "bin" / "cc")
        assert build_child_environment()["PATH"] == os.defpath
    monkeypatch.setenv("PATH", f".:bin::{tmp_path / 'bin'}")
    assert find_program("cc") == str(tmp_path / "bin" / "cc")
    assert build_child_environment({"PATH": ":/a:b", "LD_LIBRARY_PATH": "/l:"}) == {
        "PATH": "/a",
        "LD_LIBRARY_PATH": "/l",
    }
    for name in ("pipe", "folder", "text"):
        (tmp_path / "bin" / "folder").mkdir(exist_ok=True)
        (tmp_path / "bin" / "text").write_text("not executable")
        if name == "pipe":
            os.mkfifo(tmp_path / "bin" / "pipe", 0o755)
        assert find_program(name) is None


@pytest.mark.skipif(os.name != "posix", reason="programs are files with a mode")
def test_each_search_for_a_program_skips_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant_programs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".::{tmp_path.name}")
    monkeypatch.setattr(toolkit, "read_platform", lambda: "linux x86_64")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    kit = dataclasses.replace(next(iter(toolkits().values())), pythons=("3.99",))
    assert "node, which is not on PATH" in package_problem(load_engines()["wasm"])
    searches = {
        "vela": find_vela,
        "python3.99": lambda: toolkit.find_base(kit),
        "ssh": lambda: Link(find_board("ssh://pi"), tmp_path),
        "node": lambda: find_or_start_node(tmp_path),
    }
    for search in searches.values():
        with pytest.raises((EdgeqError, DeviceError), match=r"is not installed|needs Python 3|is not on PATH"):
            search()
    assert find_qemu(load_emulators()["arm64"]) is None
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert find_vela() == str(tmp_path / "vela")
    assert toolkit.find_base(kit) == tmp_path / "python3.99"
    assert imported(tmp_path) == []
