"""Run real sshd on ports of the loopback address. Each server is a board with its own home and `python3`."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True)
class Sshd:
    """Hold a running server. `name` is its alias in the client's configuration."""

    name: str
    path: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def home(self) -> Path:
        return self.path / "home"

    def cut(self) -> None:
        """Kill the process of every connection, like a router that drops them."""
        for child in children(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def new_host_key(self) -> str:
        """Return a line of known_hosts with another key of the same kind as the server's."""
        make_key(self.path / "other")
        return known(self.port, self.path / "other.pub")


def children(pid: int) -> list[int]:
    """Return all running descendants of a process."""
    try:
        found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # the process has ended
        return []
    return [grandchild for child in found for grandchild in children(child)] + found


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def known(port: int, public: Path) -> str:
    return f"[127.0.0.1]:{port} {public.read_text()}"


class Network:
    """Hold servers, and put an `ssh` on PATH whose configuration knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.known_hosts = folder / "known_hosts"
        self._servers: list[Sshd] = []
        make_key(folder / "id")
        ssh = self.programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        ssh.chmod(0o755)

    def start(self, name: str, python: str) -> Sshd:
        """Start a server whose `python3` is the shell script `python`."""
        assert SSHD is not None
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        path = self.folder / name
        (path / "bin").mkdir(parents=True)
        (path / "home").mkdir()
        script = path / "bin" / "python3"
        script.write_text(f"#!/bin/sh\n{python}\n")
        script.chmod(0o755)
        make_key(path / "key")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = f'HOME={path}/home PATH={path}/bin:$PATH exec sh -c "$SSH_ORIGINAL_COMMAND"'
        (path / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {path}/key\nAuthorizedKeysFile {self.folder}/id.pub\n"
            f"PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nForceCommand {command}\n"
        )
        with (path / "log").open("wb") as log:
            process = subprocess.Popen([SSHD, "-D", "-e", "-f", path / "sshd_config"], stderr=log)
        server = Sshd(name, path, port, process)
        self._servers.append(server)
        with (self.folder / "config").open("a") as config:
            config.write(
                f"Host {name}\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
                f" IdentityFile {self.folder}/id\n IdentitiesOnly yes\n UserKnownHostsFile {self.known_hosts}\n"
                " GlobalKnownHostsFile none\n"
            )
        with self.known_hosts.open("a") as file:
            file.write(known(port, path / "key.pub"))
        self._wait(server)
        return server

    def end(self) -> None:
        for server in self._servers:
            server.cut()
            server.process.kill()
            server.process.wait()

    @staticmethod
    def _wait(server: Sshd) -> None:
        end = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", server.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < end, (server.path / "log").read_text()
                time.sleep(0.05)
