"""A headless browser for tests, driven over a pipe: Chromium's DevTools protocol, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0
"""How long an answer may take."""

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str | None:
    """The path of a browser; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab.

    Attributes:
        troubles: What it logged as an error, and what it asked of a network.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.troubles: list[str] = []

    def open(self, file: Path, width: int, height: int, dark: bool = False) -> None:
        """Load a file in a window of this size; below 600 wide, as on a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        self.browser.wait_for("Page.loadEventFired", self)

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        return self.browser.send(method, params, self)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that fits, with the mouse."""
        self.run(
            f"document.querySelector({selector!r})"
            ".scrollIntoView({block: 'center', behavior: 'instant'})"
        )
        box = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                      clickCount=1)  # fmt: skip

    def picture(self, file: Path, full: bool = False) -> None:
        """Write what it shows as a PNG: the window, or all of the page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(found["data"]))

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keep what should not happen."""
        if method == "Runtime.exceptionThrown":
            self.troubles.append(str(params["exceptionDetails"]))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.troubles.append(str(params["entry"]))
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.troubles.append(str(params["args"]))
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("file:", "data:")
        ):
            self.troubles.append(params["request"]["url"])


class Browser:
    """A process of Chromium."""

    def __init__(self, path: str, folder: Path) -> None:
        down, up = os.pipe(), os.pipe()

        def place() -> None:
            """The browser reads at 3 and writes at 4."""
            read, write = os.dup(down[0]), os.dup(up[1])
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={folder}"], close_fds=False, preexec_fn=place,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down[0])
        os.close(up[1])
        self.out, self.into, self.rest, self.count = down[1], up[0], b"", 0
        self.events: list[tuple[str, str]] = []
        self.pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new tab."""
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        return self.pages.setdefault(session["sessionId"], Page(self, session["sessionId"]))

    def send(self, method: str, params: dict[str, Any], page: Page | None = None) -> Any:
        """Call a method, of a tab or of the browser, and wait for the answer."""
        self.count += 1
        number = self.count
        call: dict[str, Any] = {"id": number, "method": method, "params": params}
        if page is not None:
            call["sessionId"] = page.session
        os.write(self.out, json.dumps(call).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def wait_for(self, event: str, page: Page) -> None:
        """Wait until a tab says something."""
        while (event, page.session) not in self.events:
            self._next()
        self.events.remove((event, page.session))

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.into], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            found = os.read(self.into, 1 << 20)
            assert found, "the browser has ended"
            self.rest += found
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            session = message.get("sessionId", "")
            self.events.append((message["method"], session))
            if session in self.pages:
                self.pages[session].note(message["method"], message["params"])
        return message

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose files are in a folder, ended at the end."""
    path = find()
    assert path is not None, "there is no browser"
    found = Browser(path, folder)
    try:
        yield found
    finally:
        found.close()
