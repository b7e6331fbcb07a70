"""The URLs of engines with the components that they join, and a file of them that changes while the process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from kvrouter.sidecar.kubernetes.pods import FoundEngine
from kvrouter.v1.names import check_name

log = structlog.get_logger(component="engines")

_LOOK_SECONDS = 0.5
_MAX_BYTES = 1 << 20


def checked_url(url: str) -> str:
    """Returns the URL of an engine's HTTP API.

    Raises:
        ValueError: it is none, or has a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"expected http://host:port, received {url!r}")
    if parts.username is not None:
        # Logs and the registration contain the URL.
        raise ValueError("expected no user and password in the URL: use --engine-keys-file")
    return url


def split_component(engine: str) -> tuple[str, str]:
    """Returns the component that an engine is to join, empty if it is not named, and its URL, from COMPONENT=URL."""
    name, equals, url = engine.partition("=")
    return (name, url) if equals and ":" not in name else ("", engine)


def checked_engine(engine: str) -> str:
    """Returns the URL of an engine, which the name of its component may precede: COMPONENT=URL.

    Raises:
        ValueError: the URL or the name is invalid.
    """
    component, url = split_component(engine)
    if component:
        check_name(component)
    checked_url(url)
    return engine


def url_in(line: str) -> str:
    """Returns the URL in a line of a file, without a slash at its end; empty for none. It is not checked."""
    return line.partition("#")[0].strip().rstrip("/")


def read_engines(path: Path) -> tuple[str, ...]:
    """Returns the engines in a file, without a slash at their ends, each once. Text after ``#`` is a comment. Blocks.

    Raises:
        ValueError: the file cannot be read, is longer than 1 MiB, or has something else; the message is one line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}") from None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path} is longer than {_MAX_BYTES} bytes")
    urls = []
    for number, line in enumerate(lines, start=1):
        try:
            if url := url_in(line):
                urls.append(checked_engine(url))
        except ValueError as error:
            raise ValueError(f"line {number} of {path}: {error}") from None
    return tuple(dict.fromkeys(urls))


async def engines_in(path: Path) -> AsyncGenerator[tuple[FoundEngine, ...]]:
    """Yields the engines in a file, at once and within a second of each change, for ever.

    A file that cannot be used is logged once, and the last usable content counts.
    """
    last: tuple[str, ...] | None = None
    refused = ""
    while True:
        try:
            # Read each time: the time of a change is too coarse on some file systems, and a file may be replaced.
            urls = await asyncio.to_thread(read_engines, path)
        except ValueError as error:
            if str(error) != refused:
                log.error("engines_file.refused", cause=str(error), consequence="the engines stay as they are")
            refused = str(error)
        else:
            refused = ""
            if urls != last:
                last = urls
                yield tuple(map(FoundEngine, urls))
        await asyncio.sleep(_LOOK_SECONDS)
