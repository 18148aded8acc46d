"""Headless Chromium, driven through its own DevTools protocol over a pipe: no package, no port, no network.

    with Browser() as browser:
        tab = browser.open(page, width=390, height=844)
        assert tab.problems == []
        tab.value("document.title")

Whatever a page asks for is stopped and noted, but for the page's own file, what it has within itself, and the files of
its `site`.
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

EXECUTABLE_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-default-apps", "--disable-extensions", "--remote-debugging-pipe"),
)
TIMEOUT_S = 240.0


def find_executable() -> str | None:
    return next(filter(None, map(shutil.which, EXECUTABLE_NAMES)), None)


def is_enabled() -> bool:
    """Whether tests are to use one: where it is here, and where it is said that it has to be (as in CI)."""
    return bool(find_executable()) or os.environ.get("PARAGAN_BROWSER") == "required"


class Browser:
    """One process with a profile of its own, which ends with this."""

    def __init__(self) -> None:
        path = find_executable()
        assert path, f"none of {', '.join(EXECUTABLE_NAMES)} is here"
        self._profile = tempfile.TemporaryDirectory(prefix="paragan-browser-", ignore_cleanup_errors=True)
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        reference = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # clear of 3 and 4, where it looks
        command = [path, *CHROMIUM_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&{} 4>&{}'.format(*reference), "bash", *command],
            pass_fds=reference,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (read, write, *reference):
            os.close(end)
        self._message_ids, self._buffer, self.events = itertools.count(1), b"", list[dict[str, Any]]()
        self.sites = dict[str, str]()  # session -> address of the folder whose files its page may load

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        number = self.send(method, session, **parameters)
        while True:
            message = self._read_message()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def send(self, method: str, session: str = "", **parameters: Any) -> int:
        """Send a command, and return the number that its answer will have."""
        number = next(self._message_ids)
        reported = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(reported).encode() + b"\0")
        return number

    def wait_for_event(self, method: str, session: str) -> dict[str, Any]:
        """The next event of this name."""
        for place, event in enumerate(self.events):
            if event["method"] == method and event.get("sessionId") == session:
                return self.events.pop(place)
        while True:
            message = self._read_message()
            if message.get("method") == method and message.get("sessionId") == session:
                self.events.remove(message)
                return message

    def _read_message(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {TIMEOUT_S:g} s"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        first, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(first)
        if "method" in message:
            self.events.append(message)
        if message.get("method") == "Fetch.requestPaused":
            session, paused = message["sessionId"], message["params"]
            if session in self.sites and paused["request"]["url"].startswith(self.sites[session]):
                self.send("Fetch.continueRequest", session, requestId=paused["requestId"])
        return message

    def open(
        self,
        page: Path | str,
        width: int,
        height: int,
        script: bool = True,
        dark: bool = False,
        wait_for_load: bool = True,
        site: Path | str | None = None,
    ) -> Tab:
        """Open a page: a file or an address.

        wait_for_load: whether to wait until all is there; site: a folder, or an address, that it may load files of.
        """
        tab = Tab(self, page, width, height, script, dark, site)
        if wait_for_load:
            self.wait_for_event("Page.loadEventFired", tab.session)
        return tab


def _address_of(page: Path | str) -> str:
    return page if isinstance(page, str) else page.resolve().as_uri()


class Tab:
    """A page that was loaded at a size."""

    def __init__(
        self,
        browser: Browser,
        page: Path | str,
        width: int,
        height: int,
        script: bool,
        dark: bool,
        site: Path | str | None = None,
    ):
        self.browser, self.address, self.width = browser, _address_of(page), width
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Fetch.enable", patterns=[{"urlPattern": "*"}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.events.clear()
        browser.send("Page.navigate", self.session, url=self.address)  # which is answered when it was let through
        paused = browser.wait_for_event("Fetch.requestPaused", self.session)["params"]
        assert paused["request"]["url"] == self.address
        self.call("Fetch.continueRequest", requestId=paused["requestId"])
        if site:
            browser.sites[self.session] = _address_of(site) + "/"

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    @property
    def requests(self) -> list[str]:
        """What was asked for beyond the page itself, and the files of its site."""
        reported = (
            e["params"]["request"]["url"] for e in self._events("Network.requestWillBeSent", "Fetch.requestPaused")
        )
        allowed = ("data:", *filter(None, [self.browser.sites.get(self.session)]))
        return [*dict.fromkeys(url for url in reported if url != self.address and not url.startswith(allowed))]

    @property
    def console_messages(self) -> list[Any]:
        """What the console shows: errors, warnings, messages."""
        self.evaluate("0")  # all that was said before is here after an answer
        named = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self._events(*named)]

    def _events(self, *methods: str) -> list[dict[str, Any]]:
        return [e for e in self.browser.events if e["method"] in methods and e.get("sessionId") == self.session]

    def evaluate(self, expression: str) -> Any:
        """Of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Return when it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"waited for {expression}"
            time.sleep(0.02)

    def press_key(self, key: str) -> None:
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def type_text(self, text: str) -> None:
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def tap(self, x: float, y: float) -> None:
        self.call("Page.bringToFront")
        self.call("Input.synthesizeTapGesture", x=x, y=y, gestureSourceType="touch")

    def screenshot(self) -> bytes:
        """PNG of what is seen."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])


def main() -> None:
    """python tests/browser.py PAGE.html|ADDRESS OUT.png 1280x1800: a picture of the top of a page."""
    page, out, size = sys.argv[1:]
    is_address = page.startswith("http://")
    width, height = map(int, size.split("x"))
    with Browser() as browser:
        Path(out).write_bytes(browser.open(page if is_address else Path(page), width, height).screenshot())


if __name__ == "__main__":
    main()
