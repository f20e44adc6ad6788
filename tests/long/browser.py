"""A real browser for tests: Debian's Chromium, headless, spoken to in its DevTools protocol over two pipes.

Started as

    chromium --headless --no-sandbox --remote-debugging-pipe --user-data-dir=FOLDER about:blank

Commands go to its file descriptor 3 and answers come from 4, JSON with a zero byte behind each (content/browser/devtools of
Chromium, devtools_pipe_handler.cc). No port is opened. Without a sandbox of its own, since tests run as root; it only ever sees the
page of a test. Where it is missing it is installed with apt-get; the fonts are DejaVu's.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = ("chromium", "fonts-dejavu-core")
SECONDS = 60.0


def program() -> str:
    """Chromium's path. Raises FileNotFoundError with what apt said where it cannot be had."""
    found = shutil.which("chromium")
    if found:
        return found
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-q", *command], env=environment, capture_output=True, text=True, check=False, timeout=900
        )
        said = done.stdout + done.stderr
    found = shutil.which("chromium")
    if not found:
        raise FileNotFoundError(f"there is no chromium, and apt-get cannot install it: {said[-600:]}")
    return found


class Browser:
    """One browser with one page. What the page logs, throws or asks for is kept."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "chromium.log"
        (to_browser, self._write), (self._read, from_browser) = os.pipe(), os.pipe()
        # Well above 3 and 4, which the shell makes of them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_browser, from_browser)]
        for end in (to_browser, from_browser):
            os.close(end)
        command = [
            *(program(), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={folder / 'profile'}", "about:blank"),
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} >"$0" 2>&1', str(self.log), *command],
            stdin=subprocess.DEVNULL,
            pass_fds=ends,
            env={**os.environ, "HOME": str(folder)},
        )
        for end in ends:
            os.close(end)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self._write, self._read):
            os.close(descriptor)

    def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        over = time.monotonic() + SECONDS
        while True:
            told = self._next(over)
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self.events.append(told)

    def _next(self, over: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = over - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"the browser said nothing for {SECONDS:g} s; {self.log}")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError(f"the browser ended; {self.log}")
            self._rest += chunk
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._ask(method, parameters)

    def show(self, page: Path, width: int, height: int = 900, phone: bool = False) -> None:
        """Load a file in a window of a size and wait until it is there."""
        self.events.clear()
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.do("Page.navigate", url=page.resolve().as_uri())
        over = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.events if "method" in event):
            self.events.append(self._next(over))

    def value(self, expression: str) -> Any:
        told = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"])
        return told["result"]["value"]

    def picture(self, into: Path) -> None:
        """The whole page as PNG."""
        told = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        into.write_bytes(base64.b64decode(told["data"]))

    def printed(self, into: Path) -> None:
        """The page on A4 as PDF."""
        told = self.do("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        into.write_bytes(base64.b64decode(told["data"]))

    def complaints(self) -> list[str]:
        """What the page logged or threw since it was shown."""
        found = []
        for event in self.events:
            told = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(str(told["args"]))
            elif event.get("method") == "Log.entryAdded":
                found.append(f"{told['entry']['level']}: {told['entry']['text']}")
        return found

    def asked_for(self) -> list[str]:
        """Addresses that the page asked for; what lies in it (data:) is none."""
        told = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in told if not url.startswith("data:")]
