"""Control a real browser through its debugging pipe: load a page, collect its problems, take pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_SECONDS = 60.0


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """Control one tab.

    `problems` collects console messages, exceptions and log entries. `requests` collects every requested URL.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, page: Path, *, width: int = 1100, dark: bool = False, media: str = "") -> None:
        """Load a file as on a screen of this width."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.navigate(page.resolve().as_uri())

    def navigate(self, url: str) -> None:
        """Load a URL."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, to: Path) -> None:
        """Save a screenshot of the whole page, including the part outside the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, fromSurface=True)
        to.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """Print the page on A4 and return the PDF. It has no background colours, which is the default of browsers."""
        printed = self.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.7)
        return base64.b64decode(printed["data"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._reader, 1 << 20)
            assert received, "the browser is gone"
            self._buffer += received
        raw, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, report: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(report["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {report['args']}")
        elif event == "Log.entryAdded":
            self.problems.append(f"log: {report['entry'].get('text')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(report["request"]["url"])


@contextlib.contextmanager
def browsing(program: str, *flags: str) -> Iterator[Page]:
    """Run a browser with a temporary profile."""
    # The browser reads from file descriptor 3 and writes to 4.
    its_input, our_output = os.pipe()
    our_input, its_output = os.pipe()
    with tempfile.TemporaryDirectory(prefix="edgeq-browser-", ignore_cleanup_errors=True) as profile:
        command = [program, *_FLAGS, *flags, f"--user-data-dir={profile}"]
        shell = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", *command]
        process = subprocess.Popen(
            shell, pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(its_input)
        os.close(its_output)
        try:
            yield Page(our_input, our_output)
        finally:
            process.kill()
            process.wait()
            os.close(our_input)
            os.close(our_output)
