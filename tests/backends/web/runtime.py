"""Provide the web runtime here: its package, node, and a server for pages."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from edgeq_device.engines.catalog import describe_problem
from edgeq_device.engines.node_package import package_folder

from edgeq.run.engines import load_engines

WASM = load_engines()["wasm"]
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}


def need_runtime() -> None:
    """Skip the test with a solution if node or the package is missing."""
    problem = describe_problem(WASM, "99")
    if problem:
        pytest.skip(problem)


def with_runtime(site: Path) -> Path:
    """Link the package into `site`, where its lock file would put it, and return `site`."""
    modules = site / "node_modules"
    modules.mkdir(exist_ok=True)
    (modules / WASM.module).symlink_to(package_folder(WASM))
    return site


def in_node(script: str, *arguments: str) -> Any:
    """Run a module in node and return the JSON that it prints."""
    command = ["node", "--input-type=module", "-e", script, "--", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm", "": "text/plain"}  # noqa: RUF012

    def __init__(self, *arguments: Any, headers: Mapping[str, str], posted: list[Any], **how: Any) -> None:
        self._headers, self._posted = headers, posted
        super().__init__(*arguments, **how)

    def end_headers(self) -> None:
        for name, value in self._headers.items():
            self.send_header(name, value)
        super().end_headers()

    def do_POST(self) -> None:
        self._posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def served(site: Path, headers: Mapping[str, str] = ISOLATED) -> Iterator[tuple[int, list[Any]]]:
    """Serve `site` on this machine only. Yield the port and the list of what is posted."""
    posted: list[Any] = []
    handler = partial(_Handler, directory=str(site), headers=headers, posted=posted)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port, posted
        server.shutdown()
