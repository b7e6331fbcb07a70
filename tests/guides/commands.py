"""Executes the commands that a guide shows.

A fenced block with the language ``sh`` is a command, as a reader pastes it into a shell in the repository's directory.
One with the language ``python`` is code, which a reader saves as a file. All others are output or excerpts, and are not
executed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECONDS = 90


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    line: int
    """Line of its fence, from 1."""
    language: str
    """What follows the fence; empty for none."""
    text: str


def blocks_of(document: str) -> list[Block]:
    """Returns the fenced blocks of a document."""
    return [
        Block(document.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in _FENCE.finditer(document)
    ]


class RunningCommand:
    """A command that runs until it is stopped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.output = ""
        """What has been read of its output, standard error included."""
        self._process = process

    async def prints(self, pattern: str) -> re.Match[str]:
        """Reads on until a line matches, and returns the match."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_SECONDS):
            while True:
                line = (await self._process.stdout.readline()).decode()
                assert line, f"expected a line like {pattern!r}, but the command ended:\n{self.output}"
                self.output += line
                if found := re.search(pattern, line):
                    return found

    async def interrupt(self) -> None:
        """Presses Ctrl-C, and waits until the command has ended."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGINT)
        async with asyncio.timeout(_SECONDS):
            await self._process.communicate()

    async def kill(self) -> None:
        """Ends the command and what it started."""
        with suppress(ProcessLookupError):  # It may have ended by itself.
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.communicate()


@contextmanager
def _alone() -> Iterator[None]:
    """Waits for other tests that run ``kvrouter up``, because its default ports are the same for all."""
    with (Path(tempfile.gettempdir()) / "kvrouter-up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Guide:
    """The commands of one guide. Use it as a context: at its end every command must have been executed."""

    def __init__(self, path: str, *, replaced: Mapping[str, str] | None = None, directory: Path = REPOSITORY) -> None:
        """Args:
        path: The document, relative to the repository.
        replaced: What a reader replaces, such as addresses, by the text in the guide.
        directory: Where the commands run; a directory other than the repository's gets a link to each of its entries.
        """
        self.directory = directory
        self._text = (REPOSITORY / path).read_text(encoding="utf-8")
        self._blocks = blocks_of(self._text)
        self._replaced: dict[str, str] = {}
        self._executed: set[int] = set()
        self.replace(replaced or {})
        if directory != REPOSITORY:
            for entry in (*REPOSITORY.glob("[a-zA-Z]*"), Path(sys.prefix)):
                link = directory / (".venv" if entry == Path(sys.prefix) else entry.name)
                if not link.exists():
                    link.symlink_to(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            left = [block.text for block in self._blocks if block.language == "sh" and block.line not in self._executed]
            assert not left, f"commands that the test does not execute: {left}"

    def replace(self, replaced: Mapping[str, str]) -> None:
        """Replaces more of the guide's text, such as an address that an earlier command printed."""
        for old in replaced:
            assert old in self._text, f"the guide has no {old!r} to replace"
        self._replaced |= replaced

    def block(self, containing: str, language: str) -> str:
        """Returns the text of the only block of a language that contains a text, with its replacements."""
        found = [block for block in self._blocks if block.language == language and containing in block.text]
        assert len(found) == 1, f"expected one {language} block with {containing!r}, found {len(found)}"
        self._executed.add(found[0].line)
        text = found[0].text
        for old in sorted(self._replaced, key=len, reverse=True):
            text = text.replace(old, self._replaced[old])
        return text

    def save(self, containing: str, name: str) -> Path:
        """Saves the Python block that contains a text as a file in the directory of the commands."""
        path = self.directory / name
        path.write_text(self.block(containing, "python"), encoding="utf-8")
        return path

    async def run(self, containing: str) -> str:
        """Runs a command to its end and returns its output. It must succeed."""
        process = await self._start(containing)
        try:
            async with asyncio.timeout(_SECONDS):
                output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode == 0, output
        return output

    async def until(self, containing: str, condition: Callable[[str], bool]) -> str:
        """Runs a command again until its output meets a condition, and returns that output."""
        async with asyncio.timeout(_SECONDS):
            while not condition(output := await self.run(containing)):
                await asyncio.sleep(0.1)
        return output

    @asynccontextmanager
    async def running(self, containing: str) -> AsyncIterator[RunningCommand]:
        """Runs a command while the context lasts, as in another terminal."""
        with _alone() if "kvrouter up" in containing else nullcontext():
            command = RunningCommand(await self._start(containing))
            try:
                yield command
            finally:
                await command.kill()

    async def _start(self, containing: str) -> asyncio.subprocess.Process:
        command = self.block(containing, "sh")
        # A reader's directory has .venv; so that tests run in any environment, its commands are those of this one.
        command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        return await asyncio.create_subprocess_exec(
            *("bash", "-e", "-o", "pipefail", "-c", command),
            cwd=self.directory,
            env=dict(os.environ) | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            # As in a terminal: tests that run in the background ignore Ctrl-C, and what they start would too.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
