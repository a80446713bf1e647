# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, spoken to through two pipes in its DevTools protocol; needs no package but the browser."""

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
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """The browser's path, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``messages``: what scripts logged and threw, and what the page was refused."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="page-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe --hide-scrollbars"
        )
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "-", path, *flags.split(), f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", None
        self.messages: list[str] = []
        end = time.monotonic() + 60
        while not (pages := [t["targetId"] for t in self._targets() if t["type"] == "page"]):  # not at once
            assert time.monotonic() < end, "the browser has opened no page"
            time.sleep(0.05)
        page = pages[0]
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _targets(self) -> list[dict[str, Any]]:
        return self._call("Target.getTargets")["targetInfos"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        os.close(self._write)
        os.close(self._read)
        for _ in range(50):
            with contextlib.suppress(OSError):
                self._folder.cleanup()
                return
            time.sleep(0.1)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            told, found, self._rest = self._rest.partition(b"\0")
            if not found:
                self._rest = told
                left = until - time.monotonic()
                assert left > 0, f"the browser has not answered {method} within 60 s"
                if select.select([self._read], [], [], left)[0]:
                    more = os.read(self._read, 2**20)
                    assert more, f"the browser ended during {method}"
                    self._rest += more
                continue
            answer = json.loads(told)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])

    def show(self, width: int, height: int, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, as JSON; promises are waited for."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > end:
                shown = self.evaluate("document.body?.innerText")  # null before a page has begun
                raise AssertionError(f"{script} is not true within {seconds} s; {self.messages}; shown: {shown}")
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                modifiers=8 * shift,
                **(extra if kind == "keyDown" else {}),
            )

    def picture(self, path: Path) -> bytes:
        """The whole page as PNG, written to ``path``."""
        data = base64.b64decode(self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data
