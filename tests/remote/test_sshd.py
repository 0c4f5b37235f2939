"""Test boards through OpenSSH's own client and server, if the server is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeq.errors import BoardError
from edgeq.remote.devices import find_board
from edgeq.remote.doctor import doctor_board
from edgeq.remote.machine import detect_board
from edgeq.remote.session import open_board
from tests.remote.sshd import SSHD, Network, Sshd
from tests.remote.test_session import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(SSHD is None, reason="sshd (openssh-server) is not installed")]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("ssh"))
    yield made
    made.end()


@pytest.fixture
def board(network: Network, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Sshd:
    monkeypatch.setenv("PATH", f"{network.programs}{os.pathsep}{os.environ['PATH']}")
    name = request.node.name.replace("_", "-")
    return network.start(name, f'exec {sys.executable} "$@"')


def test_a_board(board: Sshd) -> None:
    found = doctor_board(find_board(f"ssh://{board.name}"))
    assert {check.name: check.status for check in found.checks}["kernels"] == "ok"
    assert detect_board(find_board(f"ssh://{board.name}")).machine.architecture
    cache = board.home / ".cache" / "edgeq-device"
    assert {path for path in board.home.rglob("*") if path.is_file()} == {p for p in cache.rglob("*") if p.is_file()}


def test_host_keys(board: Sshd, network: Network) -> None:
    right = network.known_hosts.read_text()
    lines = [line for line in right.splitlines() if f":{board.port} " not in line]
    for text, says in ((board.new_host_key(), "differs from the known one"), ("", "not known yet")):
        network.known_hosts.write_text("\n".join([*lines, text]) + "\n")
        with pytest.raises(BoardError, match=says), open_board(find_board(f"ssh://{board.name}")):
            raise AssertionError
    network.known_hosts.write_text(right)
    with open_board(find_board(f"ssh://{board.name}")) as session:
        assert session.hello.token


def test_a_link_that_is_cut(board: Sshd, tmp_path: Path) -> None:
    import subprocess

    mark = tmp_path / "pid"
    code = f"import os,time; open({str(mark)!r},'w').write(str(os.getpid())); time.sleep(60)"
    with open_board(find_board(f"ssh://{board.name}")) as session:
        child = subprocess.Popen(session.attached_command(*session.python, "-c", code), stderr=subprocess.DEVNULL)
        wait_for(lambda: mark.exists() and mark.read_text() != "")
        board.cut()
        with pytest.raises(BoardError, match="the link was cut"):
            session.ask({"do": "tree", "keep": True, "digest": "0"})
    assert child.wait(15) != 0
    wait_for(lambda: not Path(f"/proc/{mark.read_text()}").exists())
    with open_board(find_board(f"ssh://{board.name}")) as session:
        assert session.hello.token
