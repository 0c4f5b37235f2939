"""Test which files are opened and written while hostile bundles are read, as strace sees them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cli.process import REPOSITORY, environment

from .attacks import archives, directories
from .samples import INPUT, tree

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("strace") is None, reason="strace is not installed"
)

HOSTILE = "$(touch owned)\x1b[2J"
# Bundles that are refused, sealed so that only one check protects the files that they name, and bundles that open.
REFUSED = ("name_outside", "model_absolute", "option_that_writes", "weights_folder_outside", "link_to_a_file")
PACKED = ("name_outside",)

# Read all bundles in one process, as a device does and as a workstation does.
RUNNER = """
import sys
from edgeq_device.cli import main

for bundle in sys.argv[1:]:
    main(["info", "--bundle", bundle])
    main(["verify", "--bundle", bundle])
    main(["bench", "--duration", "0", "--queries", "2", "--bundle", bundle])
    main(["infer", "x.npy", "-o", "private/o.npz", "--force", "--bundle", bundle])
"""
WORKSTATION = """
import sys
from edgeq.cli import group

for bundle in sys.argv[1:]:
    for command in (["verify", bundle], ["bench", bundle, "--duration", "0", "--queries", "2"]):
        try:
            group.main(command, prog_name="edgeq")
        except SystemExit:
            pass
"""
STRACE = ["strace", "-f", "-y", "-qq", "-s", "4096", "--seccomp-bpf", "-e", "trace=%file", "-o"]
_CALL = re.compile(r'(\w+)\((?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"(.*)\) += (-?\d+)')
_CHANGES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT")
_OPENS = {"open", "openat", "openat2"}
_LOOKS = {
    "stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "statfs",
    "getcwd", "execve", "chdir", "getxattr", "lgetxattr",
}  # fmt: skip
# Libraries, Python, and the kernel's data about machine and process.
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", "/opt", "/bin")


@pytest.fixture(scope="module")
def folder(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make bundles, an input, and secrets next to them."""
    place = tmp_path_factory.mktemp("touched")
    for name in REFUSED:
        directories.ATTACKS[name][0](Path(shutil.copytree(good, place / name)))
    for name in PACKED:
        (place / f"{name}.edgeq").write_bytes(archives.ATTACKS[name][0](tree(good)))
    named = Path(shutil.copytree(good, place / "named"))
    directories.edit_info(named, profile="../secret.toml", target="../secret.toml", table="t", products=[HOSTILE])
    directories.seal(named, package_name=HOSTILE, description="../secret.toml")
    for name in ("numpy", "secret.toml", "runner.cfg"):
        (named / name).write_text("import os; os.mkdir('owned')")
    (place / "named.edgeq").write_bytes(archives.pack(tree(good)))
    for name in ("secret.toml", "secret.onnx", "weights.bin"):
        (place / name).write_text("secret")
    np.save(place / "x.npy", INPUT)
    (place / "private").mkdir()
    return place


def traced(code: str, folder: Path) -> Iterator[tuple[str, Path, bool]]:
    """Yield every call that opened or changed a file: the call, the file, and True if it is a change."""
    bundles = [p.name for p in sorted(folder.iterdir()) if p.name != "private" and (p.is_dir() or p.suffix == ".edgeq")]
    log = folder.parent / "strace.log"
    done = subprocess.run(
        [*STRACE, str(log), sys.executable, "-P", "-c", code, *bundles],
        cwd=folder,
        env=environment(TMPDIR=str(folder / "private"), HOME=str(folder / "private")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "was changed" not in done.stderr
    for line in log.read_text("utf-8", "surrogateescape").splitlines():
        match = _CALL.search(line)
        if match is None or match[5].startswith("-") or match[1] in _LOOKS:
            continue
        changes = match[1] not in _OPENS or _CHANGES.search(match[4]) is not None
        yield match[1], Path(os.path.normpath(Path(match[2] or folder, match[3]))), changes


@pytest.mark.parametrize("code", [RUNNER, WORKSTATION], ids=["runner", "workstation"])
def test_nothing_outside_is_touched(code: str, folder: Path) -> None:
    before = {name: data for name, data in tree(folder).items() if not name.startswith("private/")}
    own = [Path(sys.prefix), Path(sys.base_prefix), REPOSITORY, *map(Path, _SYSTEM)]
    private, opened = folder / "private", set()
    for call, file, changes in traced(code, folder):
        where = f"{call} {file}"
        if folder in file.parents:
            first = file.relative_to(folder).parts[0]
            opened.add(first)
            assert first == "private" or not changes, where
            assert first == "x.npy" or first.endswith(".edgeq") or (folder / first).is_dir(), where
        elif changes:
            assert file == Path("/dev/null") or file.parent == Path("/dev/shm"), where
        else:
            assert file == folder or any(place == file or place in file.parents for place in own), where
    assert {"named", "named.edgeq", "name_outside.edgeq"} <= opened
    assert {name: data for name, data in tree(folder).items() if not name.startswith("private/")} == before
    assert [name for name in tree(private) if name != "o.npz"] == []
