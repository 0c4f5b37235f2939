"""Test how edgeq installs, finds and runs a vendor's toolkit, with scripts in place of its Python and of pip."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from edgeq_device.system.budget import without_seconds

from edgeq.backends.base import toolkits
from edgeq.errors import BudgetError, EngineError, OutputError, RuntimeUnavailableError
from edgeq.run import toolkit as outside
from edgeq.run.toolkit import Toolkit, ToolkitJob, describe_state, find_python, install
from tests.cli import process

KIT = next(iter(toolkits().values()))
pytestmark = pytest.mark.skipif(os.name != "posix", reason="scripts replace Python")


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """Return a toolkit in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(KIT.variable, raising=False)
    return replace(KIT, megabytes=1)


def script(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return place


def installed(kit: Toolkit, action: str = "") -> Path:
    """Write a Python of the toolkit that leaves a mark whenever it runs."""
    kit.folder.mkdir(mode=0o700, parents=True)
    mark = f"echo ran >>'{kit.folder.parent}.ran'"
    return script(
        kit.folder / "bin" / "python", f'{mark}\nif [ "$2" = -c ]; then echo {kit.version}; exit 0; fi\n{action}'
    )


def base_python(monkeypatch: pytest.MonkeyPatch, folder: Path, pip: str) -> Path:
    """Put a Python in place of the base, which makes an environment whose Python runs `pip`."""
    calls = folder / "calls"
    inner = f'if [ "$2" = -c ]; then echo {KIT.version}; exit 0; fi\\necho "$@" >>{calls}\\n{pip}'
    text = f'echo "$@" >>{calls}\nmkdir -p "$4/bin"\nprintf \'#!/bin/sh\\n{inner}\\n\' >"$4/bin/python"\n'
    base = script(folder / "base", text + 'chmod 755 "$4/bin/python"')
    monkeypatch.setattr(outside, "find_base", lambda toolkit: base)
    return calls


def test_pip_takes_only_files_with_a_known_hash(kit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = base_python(monkeypatch, tmp_path, "exit 0")
    python = install(kit)
    assert python == find_python(kit)
    assert (kit.folder.stat().st_mode & 0o777, list(kit.folder.parent.iterdir())) == (0o700, [kit.folder])
    venv, pip = calls.read_text().splitlines()
    assert venv.startswith("-I -m venv ")
    assert pip.startswith("-I -m pip install ")
    for option in ("--require-hashes", "--only-binary=:all:", "--no-deps", f"--requirement {kit.lock_file}"):
        assert option in pip
    assert install(kit) == python
    assert len(calls.read_text().splitlines()) == 2, "an installed toolkit is not installed again"


def test_the_lock_names_each_package_with_its_hashes() -> None:
    text = "\n".join(line for line in KIT.lock_file.read_text("utf-8").splitlines() if not line.startswith("#"))
    entries = [entry for entry in re.split(r"\n(?=\S)", text.replace("\\\n", " ")) if entry.strip()]
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; [^\\#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", entry), entry
    assert f"{KIT.package}=={KIT.version} " in text
    assert len(entries) > 10


@pytest.mark.parametrize("pip", ["exit 1", "kill -9 $$"])
def test_a_failed_installation_leaves_no_environment(
    kit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: str
) -> None:
    base_python(monkeypatch, tmp_path, pip)
    (kit.folder.with_name(f"{kit.folder.name}.partial") / "bin").mkdir(parents=True)
    kit.folder.parent.chmod(0o700)
    kit.folder.parent.parent.chmod(0o700)
    with pytest.raises(RuntimeUnavailableError, match="cannot be installed"):
        install(kit)
    assert list(kit.folder.parent.iterdir()) == []


def test_two_installations_do_not_mix(kit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_python(monkeypatch, tmp_path, "exit 0")
    kit.folder.parent.mkdir(mode=0o700, parents=True)
    with outside._lock(kit.folder.parent), pytest.raises(OutputError, match="another process installs into"):
        install(kit)
    assert install(kit).is_file()


SPOIL = [
    ("the folder", lambda kit: kit.folder.chmod(0o777)),
    ("its group", lambda kit: kit.folder.chmod(0o770)),
    ("the Python", lambda kit: (kit.folder.chmod(0o755), (kit.folder / "bin" / "python").chmod(0o777))),
    ("the cache", lambda kit: kit.folder.parent.chmod(0o777)),
    ("edgeq's folder", lambda kit: kit.folder.parents[1].chmod(0o777)),
    ("XDG_CACHE_HOME", lambda kit: kit.folder.parents[2].chmod(0o777)),
    ("above XDG_CACHE_HOME", lambda kit: kit.folder.parents[3].chmod(0o777)),
    ("a file deep inside", lambda kit: (kit.folder.chmod(0o755), deep(kit.folder).chmod(0o666))),
]


def deep(folder: Path) -> Path:
    (folder / "lib" / "site-packages").mkdir(parents=True)
    module = folder / "lib" / "site-packages" / "m.py"
    module.write_text("")
    return module


@pytest.mark.parametrize(("what", "spoil"), SPOIL, ids=[what for what, _ in SPOIL])
def test_a_cache_that_others_can_write_is_not_run(kit: Toolkit, what: str, spoil: object, tmp_path: Path) -> None:
    installed(kit)
    ran = Path(f"{kit.folder.parent}.ran")
    assert "2.5.0: " in describe_state(kit)
    ran.unlink()
    assert callable(spoil)
    try:
        spoil(kit)
        assert "is not run: " in describe_state(kit), what
        assert "can be changed by others" in describe_state(kit)
        for call in (find_python, install):
            with pytest.raises(RuntimeUnavailableError, match=r"can be changed by others\. Remove .* XDG_CACHE_HOME"):
                call(kit)
        done = process.run("toolkit", cwd=tmp_path)
        assert (done.returncode, "can be changed by others" in done.stdout) == (0, True), done.stderr
        assert not ran.exists()
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_cache_of_another_user_is_not_run(kit: Toolkit, level: int) -> None:
    installed(kit)
    os.chown([kit.folder, *kit.folder.parents][level], 65534, -1)
    assert "can be changed by others" in describe_state(kit)


def test_a_cache_behind_a_link_is_checked_where_it_is(kit: Toolkit, tmp_path: Path) -> None:
    installed(kit)
    elsewhere = tmp_path / "open" / "elsewhere"
    elsewhere.parent.mkdir()
    kit.folder.parent.rename(elsewhere)
    kit.folder.parent.symlink_to(elsewhere)
    assert find_python(kit).is_file()
    elsewhere.parent.chmod(0o777)
    assert "can be changed by others" in describe_state(kit)
    elsewhere.parent.chmod(0o1777)  # sticky, as /tmp
    assert find_python(kit).is_file()


def test_a_job_has_a_time_limit_of_its_own(kit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget's limit on processor time between two steps of progress does not end a job."""
    installed(kit, "ulimit -t")
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    if limits[1] != resource.RLIM_INFINITY:
        pytest.skip("a process has little processor time here")
    used = resource.getrusage(resource.RUSAGE_SELF)
    (tmp_path / "job").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 300, limits[1]))
        with without_seconds():
            assert resource.getrlimit(resource.RLIMIT_CPU)[0] == limits[1]
        assert resource.getrlimit(resource.RLIMIT_CPU)[0] != limits[1]
        with ToolkitJob(kit, tmp_path / "script", [], tmp_path / "job") as job:
            assert job.finish().out == "unlimited\n"
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, limits)
    monkeypatch.setenv(outside.SECONDS, "0.2")
    (kit.folder / "bin" / "python").unlink()
    (kit.folder / "bin").rmdir()
    kit.folder.rmdir()
    installed(kit, "sleep 60")
    (tmp_path / "late").mkdir()
    with (
        ToolkitJob(kit, tmp_path / "script", [], tmp_path / "late") as job,
        pytest.raises(EngineError, match=r"reached its time limit of 0.2 s. Set EDGEQ_TOOLKIT_SECONDS to more seconds"),
    ):
        job.finish()


@pytest.mark.parametrize(
    ("action", "line"),
    [
        ("kill -XCPU $$", "used all the processor time that a process may use here. Raise the limit of the shell"),
        ("kill -KILL $$", "has not enough memory. Compile a smaller model, or set EDGEQ_BUDGET as in memory=8GiB"),
        ("echo MemoryError >&2; exit 1", "has not enough memory. Compile a smaller model, or set EDGEQ_BUDGET"),
    ],
)
def test_a_limit_that_ends_a_job_is_named(kit: Toolkit, tmp_path: Path, action: str, line: str) -> None:
    installed(kit, action)
    (tmp_path / "job").mkdir()
    with ToolkitJob(kit, tmp_path / "script", [], tmp_path / "job") as job, pytest.raises(BudgetError) as raised:
        job.finish()
    assert line in str(raised.value)


def until_it_ends(number: int) -> None:
    """Wait until no process has this number, or until the process is a zombie."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{number}/stat").exists() and " Z " not in Path(f"/proc/{number}/stat").read_text():
        assert time.monotonic() < deadline, "pip runs on although edgeq has ended"
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not end the children of a process")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_during_an_installation_leaves_nothing(kit: Toolkit, tmp_path: Path, number: signal.Signals) -> None:
    """A signal removes the unfinished environment. After SIGKILL, the next installation removes it."""
    pip = tmp_path / "pip"
    code = (
        "import sys\nfrom pathlib import Path\nfrom edgeq.run import toolkit\n"
        f"toolkit.find_base = lambda kit: Path({str(tmp_path / 'base')!r})\n"
        f"sys.argv = ['edgeq', 'toolkit', {kit.name!r}, '--install']\n"
        "from edgeq.__main__ import main\nmain()\n"
    )
    inner = f'echo "$$" >{pip}; exec sleep 60'
    made = f'mkdir -p "$4/bin"\nprintf \'#!/bin/sh\\n{inner}\\n\' >"$4/bin/python"'
    script(tmp_path / "base", f'{made}\nchmod 755 "$4/bin/python"')
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=process.environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=process.enable_signals,
    )
    while not pip.exists() or not pip.read_text():
        assert running.poll() is None, running.communicate()
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert "Traceback" not in err
    if number == signal.SIGKILL:
        until_it_ends(int(pip.read_text()))
        assert [place.name for place in kit.folder.parent.iterdir()] == [f"{kit.folder.name}.partial"]
        with pytest.MonkeyPatch.context() as patch:
            base_python(patch, tmp_path, "exit 0")
            install(kit)
    assert [place for place in kit.folder.parent.iterdir() if place != kit.folder] == []
