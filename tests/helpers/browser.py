"""A headless Chromium and one page of it, over its remote debugging protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.request import urlopen

from site_processes import PATIENCE_S, poll
from websockets.sync.client import connect

CHROMIUM: Final = shutil.which("chromium")


class Browser:
    """One page; `messages`: what its console and its policy complained of."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        assert CHROMIUM is not None
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        place = Path(self._folder.name)
        self._process = subprocess.Popen(
            [CHROMIUM, *arguments, "--remote-debugging-port=0", f"--user-data-dir={place}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.messages: list[str] = []
        self._last = 0
        try:
            said = place / "DevToolsActivePort"
            poll(lambda: said.exists() and said.read_text().count("\n"), "the browser's start")
            with urlopen(f"http://127.0.0.1:{said.read_text().split()[0]}/json") as answer:
                page = next(one for one in json.load(answer) if one["type"] == "page")
            self._socket = connect(page["webSocketDebuggerUrl"], max_size=None)
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol."""
        self._last += 1
        self._socket.send(json.dumps({"id": self._last, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._last:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Log.entryAdded":
                self.messages.append(message["params"]["entry"]["text"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.messages.append(json.dumps(message["params"]["exceptionDetails"])[:1000])

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, url: str, width: int, height: int, dark: bool) -> None:
        """Open a page in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setScrollbarsHidden", hidden=True)  # a picture has none, and would lack their width
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=url)

    def screenshot(self, file: Path) -> None:
        """Write the whole page as a PNG file."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(result["data"]))

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._end()
