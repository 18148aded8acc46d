"""Headless Chromium, driven through its own DevTools protocol over a pipe: no package, no port, no network.

    with Browser() as browser:
        tab = browser.open(page, width=390, height=844)
        assert tab.problems == []
        tab.value("document.title")

Whatever a page asks for is stopped and noted, but for the page's own file and what it has within itself.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-default-apps", "--disable-extensions", "--remote-debugging-pipe"),
)
TIMEOUT_S = 60.0


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def wanted() -> bool:
    """Whether tests are to use one: where it is here, and where it is said that it has to be (as in CI)."""
    return bool(executable()) or os.environ.get("PARAGAN_BROWSER") == "required"


class Browser:
    """One process with a profile of its own, which ends with this."""

    def __init__(self) -> None:
        path = executable()
        assert path, f"none of {', '.join(NAMES)} is here"
        self._profile = tempfile.TemporaryDirectory(prefix="paragan-browser-", ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # clear of 3 and 4, where it looks
        command = [path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*theirs), "bash", *command],
            pass_fds=theirs,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (read, write, *theirs):
            os.close(end)
        self._numbers, self._left, self.events = itertools.count(1), b"", list[dict[str, Any]]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def ask(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        number = self.tell(method, session, **parameters)
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def tell(self, method: str, session: str = "", **parameters: Any) -> int:
        """Send a command, and return the number that its answer will have."""
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(told).encode() + b"\0")
        return number

    def wait(self, method: str, session: str) -> dict[str, Any]:
        """The next event of this name."""
        for place, event in enumerate(self.events):
            if event["method"] == method and event.get("sessionId") == session:
                return self.events.pop(place)
        while True:
            message = self._message()
            if message.get("method") == method and message.get("sessionId") == session:
                self.events.remove(message)
                return message

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {TIMEOUT_S:g} s"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._left += data
        first, _, self._left = self._left.partition(b"\0")
        message = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, page: Path, width: int, height: int, script: bool = True, dark: bool = False, loads: bool = True
    ) -> Tab:
        """loads: whether to wait until all is there."""
        tab = Tab(self, page, width, height, script, dark)
        if loads:
            self.wait("Page.loadEventFired", tab.session)
        return tab


class Tab:
    """A page that was loaded at a size."""

    def __init__(self, browser: Browser, page: Path, width: int, height: int, script: bool, dark: bool):
        self.browser, self.address, self.width = browser, page.resolve().as_uri(), width
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Fetch.enable", patterns=[{"urlPattern": "*"}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self.ask("Emulation.setScriptExecutionDisabled", value=not script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        browser.events.clear()
        browser.tell("Page.navigate", self.session, url=self.address)  # which is answered when it was let through
        paused = browser.wait("Fetch.requestPaused", self.session)["params"]
        assert paused["request"]["url"] == self.address
        self.ask("Fetch.continueRequest", requestId=paused["requestId"])

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **parameters)

    @property
    def requests(self) -> list[str]:
        """What was asked for beyond the page itself."""
        told = (e["params"]["request"]["url"] for e in self._events("Network.requestWillBeSent", "Fetch.requestPaused"))
        return [*dict.fromkeys(url for url in told if url != self.address and not url.startswith("data:"))]

    @property
    def problems(self) -> list[Any]:
        """What the console shows: errors, warnings, messages."""
        self.value("0")  # all that was said before is here after an answer
        named = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self._events(*named)]

    def _events(self, *methods: str) -> list[dict[str, Any]]:
        return [e for e in self.browser.events if e["method"] in methods and e.get("sessionId") == self.session]

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Return when it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"waited for {expression}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[key]
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def tap(self, x: float, y: float) -> None:
        self.ask("Page.bringToFront")
        self.ask("Input.synthesizeTapGesture", x=x, y=y, gestureSourceType="touch")

    def screenshot(self) -> bytes:
        """PNG of what is seen."""
        return base64.b64decode(self.ask("Page.captureScreenshot")["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"])


def main() -> None:
    """python tests/browser.py PAGE.html OUT.png 1280x1800: a picture of the top of a page."""
    page, out, size = sys.argv[1:]
    width, height = map(int, size.split("x"))
    with Browser() as browser:
        Path(out).write_bytes(browser.open(Path(page), width, height).screenshot())


if __name__ == "__main__":
    main()
