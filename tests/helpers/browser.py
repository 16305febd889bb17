"""Headless Chromium spoken to through a pipe, in its own protocol: no driver, no port, no extra package."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # continuous integration runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser of this machine, if it has one; ``EQUILIBRIA_BROWSER`` names another."""
    named = os.environ.get("EQUILIBRIA_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page.

    Attributes:
        problems: what the page complained about: exceptions, errors on the console, refused scripts.
        requests: every address that was asked for.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._buffer = b""
        self._numbers = itertools.count(1)
        self._loaded = False
        self._session: str | None = None
        self._pid = self._start(program, profile)
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def open(
        self, path: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False
    ) -> float:
        """Show a file, or what a server has at an address; returns the seconds until it was loaded and drawn."""
        self.problems.clear()
        self.requests.clear()
        self.look(width=width, height=height, dark=dark, phone=phone)
        self._loaded = False
        began = time.monotonic()
        self._send("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not self._loaded:
            self._receive()
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - began

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Another window size or colour scheme."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self._send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, code: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self._send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click with the mouse in the middle of an element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.run(
            f"(() => {{ const r = {where}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self._send("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key, such as ("Tab", 9) or ("Enter", 13, "\\r")."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as a PNG file, all of it or what is in the window."""
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def count_cpu(self) -> None:
        """Count from now on what `cpu_seconds` returns."""
        self._send("Performance.setTimeDomain", timeDomain="threadTicks")
        self._send("Performance.enable")

    def cpu_seconds(self) -> float:
        """Processor time that the page's main thread took, however busy the machine is."""
        metrics = self._send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    def close(self) -> None:
        self._session = None
        try:
            self._send("Browser.close", seconds=5)
        except (OSError, TimeoutError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)

    def _start(self, program: str, profile: Path) -> int:
        """The browser reads its orders from descriptor 3 and answers on 4; ours are moved well above these first."""
        ends = [*os.pipe(), *os.pipe()]
        its_input, self._to, self._from, its_output = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        for end in ends:
            os.close(end)
        quiet = os.open(os.devnull, os.O_WRONLY)
        pid = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={profile}"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, quiet, 1),
                (os.POSIX_SPAWN_DUP2, quiet, 2),
                (os.POSIX_SPAWN_DUP2, its_input, 3),
                (os.POSIX_SPAWN_DUP2, its_output, 4),
            ],
        )
        for end in (its_input, its_output, quiet):
            os.close(end)
        return pid

    def _send(self, method: str, *, seconds: float = 60, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(seconds=seconds)
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _receive(self, *, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise ConnectionResetError("the browser has gone")
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, details: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and details["type"] in {"error", "warning", "assert"}:
            self.problems.append(json.dumps(details["args"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] in {"error", "warning"}:
            self.problems.append(details["entry"]["text"])
