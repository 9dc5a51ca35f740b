"""A headless Chromium, driven over its DevTools pipe: pages as people see and use them."""

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_ANSWER_S: Final = 60
_POLL_S: Final = 0.05
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser that cannot reach any network.

    Args:
        online: Whether it reaches servers after all; the names that it resolves are this machine's only.

    Attributes:
        complaints: What the page wrote to its console, and exceptions that were not caught.
        failures: Requests that failed or were refused, as the browser itself logs them; empty unless online.
        requests: URLs that the page asked for, its own among them.
    """

    def __init__(self, *, online: bool = False) -> None:
        self.complaints: list[str] = []
        self.failures: list[str] = []
        self.requests: list[str] = []
        self._online = online
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # Chromium expects its pipes as these two descriptors.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = [*_FLAGS, f"--user-data-dir={self._home.name}"]
        if online:
            flags.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost")
        command = ["bash", "-c", script, "bash", "chromium", *flags]
        self._process = subprocess.Popen(
            command,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number = 0
        self._unread = b""
        self._loaded = False
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask(
            "Network.emulateNetworkConditions",
            offline=not online,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            self._ask("Browser.close")
            self._process.wait(_ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)
            self._home.cleanup()

    def look_like(
        self, width: int, height: int = 900, scheme: str = "light", media: str = "", scale: int = 1
    ) -> None:
        """Give the page a window's size and the user's preferences.

        Args:
            scale: Pixels of a picture for each pixel of the page, in both directions.
        """
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features, media=media)

    def open(self, file: Path) -> None:
        """Open a file and wait until it is loaded and drawn."""
        self.visit(file.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Open an address and wait until it is loaded and drawn. Another fragment of a page loads nothing."""
        self._loaded = False
        self._ask("Page.navigate", url=url)
        while not self._loaded:
            self._heed(self._receive())
        self.drawn()

    def drawn(self) -> None:
        """Wait until the page has drawn the newest data."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def wait_for(self, condition: str, what: str = "") -> Any:
        """Evaluate an expression until it is true; return its value. Fails after a minute."""
        deadline = time.monotonic() + _ANSWER_S
        # An element has no value here, and would look like nothing.
        known = f"((found) => found instanceof Node || found)({condition})"
        while not (value := self.run(known)):
            text = self.run("document.body.innerText")
            assert time.monotonic() < deadline, f"{what or condition} did not come; the page:\n{text}"
            time.sleep(_POLL_S)
        return value

    def save_downloads(self, folder: Path) -> None:
        """Save what the page offers for download in a folder."""
        session, self._session = self._session, None
        self._ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self._session = session

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page; return its value, of a promise what it gives."""
        answer = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of the elements that a selector finds."""
        found: list[str] = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"
        )
        return found

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.drawn()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send ``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel``."""
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, **more)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({where}.getBoundingClientRect())"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *box)
        self.drawn()

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def printed(self) -> bytes:
        """Return the page as a PDF."""
        return base64.b64decode(self._ask("Page.printToPDF")["data"])

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._heed(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], _ANSWER_S)[0], "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, f"the browser ended with {self._process.wait()}"
            self._unread += piece
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _heed(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                entry = params["entry"]
                # The browser logs a failed request by itself; a page cannot prevent that.
                fails = self._online and entry["source"] == "network"
                (self.failures if fails else self.complaints).append(
                    f"{entry['text']} {entry.get('url', '')}"
                )
