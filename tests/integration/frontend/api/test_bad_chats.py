"""Chats that are no chats: refused at once, in the format of the OpenAI API, with nothing booked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer

from ....waiting import until
from ..gateway import MODEL, System, running_system

HEAD = b'{"model": "%s", "messages": ' % MODEL.encode()
MESSAGE = b'[{"role": "user", "content": "x"}]'


@pytest.fixture
async def served(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    write_small_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}"
        "{% if message.content == 'loop' %}{% for i in range(10000000) %}{{ i }}{% endfor %}{% endif %}"
        "{{ message.content }}{{ 1 // (message.content | length - 4) }}"
        "{% endfor %}"
    )
    async with running_system(nats_url, etcd_endpoint, namespace) as system:
        await system.start_worker(1, tokenizer=str(tmp_path), vocabulary_size=VOCABULARY_SIZE)
        await until(lambda: system.frontend.models.has_text(MODEL))
        yield system


async def send(system: System, request: bytes) -> tuple[int, dict[str, Any]]:
    """Sends the bytes of a request; the status and the error of its response."""
    host, port = system.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            status = int((await reader.readline()).split()[1])
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return status, json.loads(await reader.readexactly(length))["error"]
    finally:
        writer.close()


CASES = {
    "/v1/chat/completions": (b"", b'"messages"', "messages"),
    "/v1/messages": (b'"max_tokens": 5, ', b'"messages"', "messages"),
    "/v1/responses": (b"", b'"input"', "input"),
}
"""By path: further fields of its bodies, and its name of the messages."""


@pytest.mark.parametrize("path", CASES)
async def test_each_is_refused_by_its_field_and_books_nothing(served: System, path: str) -> None:
    further, quoted, name = CASES[path]
    cases: list[tuple[bytes, str | None]] = [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (HEAD + b"[" * 200_000, None),
        (HEAD + MESSAGE + b', "metadata": ' + b'{"a":' * 200_000, None),
        (HEAD + b'[{"role": "user", "content": "\xff"}]}', None),
        (HEAD + b'[{"role": "user", "content": "\\ud800"}]}', None),
        (HEAD + b"[" + b'{"a":1},' * 1_000_000 + b"{}]}", "messages"),
        (b'{"model": "%s"}' % MODEL.encode(), "messages"),
        (HEAD + b"null}", "messages"),
        (HEAD + b'"x"}', "messages"),
        (HEAD + b"[]}", "messages"),
        (HEAD + b"[5]}", "messages.0"),
        (HEAD + MESSAGE + b', "n": 1000}', "n"),
        (HEAD + MESSAGE + b', "stream": "maybe"}', "stream"),
        (HEAD + MESSAGE + b', "max_tokens": -1}', "max_tokens"),
        (HEAD + MESSAGE.replace(b"x", b"word " * 20_000) + b"}", "messages"),
        (HEAD + MESSAGE.replace(b"x", b"fail") + b"}", "messages"),
        (HEAD + MESSAGE.replace(b"x", b"loop") + b"}", "messages"),
    ]
    for chat, field in cases:
        body = chat.replace(b"{", b"{" + further, 1).replace(b'"messages"', quoted, 1)
        if path == "/v1/responses" and chat == HEAD + b'"x"}':
            continue  # There the input may be a text.
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
        status, error = await send(served, head + body)
        assert (status, error["type"]) == (400, "invalid_request_error"), (body[:80], error)
        # Anthropic's errors name the field in their message only.
        named = error.get("param", error["message"].partition(":")[0])
        expected = None if field is None else field.replace("messages", name)
        assert expected is None or named == expected or (path == "/v1/messages" and "param" not in error), body[:80]
    assert await served.booked() == [0]
