"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Browser:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.messages: list[str] = []
        """Errors and warnings of the console, uncaught exceptions, and refusals of the content security policy."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and notes the events that come before its response."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(timeout=60)).data)
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}:
                self.messages.append(json.dumps(message["params"]))

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Returns when an expression is true."""
        async with asyncio.timeout(60):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.1)

    async def open(self, url: str, *, dark: bool = False, width: int = 1400, height: int = 1600) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=url)

    async def press(self, key: str) -> None:
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if kind == "keyDown" and text else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    async def screenshot(self) -> bytes:
        """Returns what is visible, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Yields a tab of a browser with an empty profile."""
    assert BINARY is not None
    process = await asyncio.create_subprocess_exec(
        *(BINARY, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"),
        *(f"--user-data-dir={profile}", "about:blank"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stderr is not None
        port = ""
        async with asyncio.timeout(60):
            while not port:
                line = (await process.stderr.readline()).decode()
                assert line, "the browser ended"
                port = "".join(re.findall(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [each for each in await response.json() if each["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=64 << 20) as socket:
                yield Browser(socket)
    finally:
        process.terminate()
        await process.communicate()
