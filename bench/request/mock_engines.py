"""Engines with OpenAI APIs in one process, which cost next to nothing, so that routers are what is measured.

    python bench/request/mock_engines.py MODEL PORT...

Each port is an engine. It answers chats, completions, Messages and Responses with as many tokens as a request asks for,
of a stream one at a time. An engine holds the last prefixes that it saw; ``GET /counts`` says how many requests each
had, and of how many it held the prefix. The usage in its responses says the same.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast

import msgspec
import uvloop

_STEP_SECONDS = 0.005
_WORD = " token"
_HELD_PREFIXES = 12
"""Prefixes that an engine holds. The load has 32, of which each of four engines needs a quarter."""
_PREFIX = slice(128, 384)
"""Bytes of a body that tell its prefix."""
_BYTES_PER_TOKEN = 5
"""Bytes of a body for each token: a word of four letters and a space. Three quarters of a prompt are its prefix."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"


class _Body(msgspec.Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """What SGLang's router makes of ``max_tokens``."""
    max_output_tokens: int | None = None
    stream: bool = False


_BODY = msgspec.json.Decoder(_Body)


class _Usage(NamedTuple):
    prompt: int
    """Tokens of the prompt."""
    cached: int
    """Those of them that the engine held."""

    def openai(self, tokens: int) -> dict[str, Any]:
        """Returns the usage of chats and completions."""
        details = {"cached_tokens": self.cached}
        return {"prompt_tokens": self.prompt, "completion_tokens": tokens, "prompt_tokens_details": details}


def _chat(tokens: int, used: _Usage) -> tuple[list[Any], Any]:
    usage = used.openai(tokens)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunk = head | {"choices": [{"index": 0, "delta": {"content": _WORD}, "finish_reason": None}]}
    last = head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    message = {"role": "assistant", "content": _WORD * tokens}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    whole = head | {"object": "chat.completion", "choices": choices, "usage": usage}
    return [*[chunk] * tokens, last, head | {"choices": [], "usage": usage}], whole


def _completion(tokens: int, used: _Usage) -> tuple[list[Any], Any]:
    usage = used.openai(tokens)
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    chunk = head | {"choices": [{"index": 0, "text": _WORD, "finish_reason": None}]}
    whole = head | {"choices": [{"index": 0, "text": _WORD * tokens, "finish_reason": "length"}], "usage": usage}
    return [*[chunk] * tokens, head | {"choices": [], "usage": usage}], whole


def _message(tokens: int, used: _Usage) -> tuple[list[Any], Any]:
    usage = {"input_tokens": used.prompt - used.cached, "cache_read_input_tokens": used.cached, "output_tokens": tokens}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "max_tokens"}
    whole |= {"content": [{"type": "text", "text": _WORD * tokens}], "usage": usage}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _WORD}}
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage}
    return [{"type": "message_start", "message": whole}, *[delta] * tokens, end, {"type": "message_stop"}], whole


def _response(tokens: int, used: _Usage) -> tuple[list[Any], Any]:
    usage = {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": tokens,
    }
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    item |= {"content": [{"type": "output_text", "text": _WORD * tokens, "annotations": []}]}
    whole = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [item]}
    whole |= {"usage": usage}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    delta = {"type": "response.output_text.delta", "sequence_number": 1, "delta": _WORD} | place
    return [{"type": "response.created"}, *[delta] * tokens, {"type": "response.completed", "response": whole}], whole


ANSWERS = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/messages": _message,
    "/v1/responses": _response,
}


def _event(body: dict[str, Any]) -> bytes:
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(body: Any, status: str = "200 OK") -> bytes:
    encoded = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


@lru_cache(1024)
def _answer(path: str, tokens: int, is_stream: bool, used: _Usage) -> list[bytes]:
    """Returns what is written in each step."""
    if path not in ANSWERS:
        return [_whole({"error": {"message": f"no API at {path}"}}, "404 Not Found")]
    events, whole = ANSWERS[path](tokens, used)
    if not is_stream:
        return [_whole(whole)]
    parts = [_chunk(_event(event)) for event in events]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = b"" if "type" in events[-1] else _chunk(b"data: [DONE]\n\n")
    return [head + parts[0], *parts[1:-1], parts[-1] + last + _chunk(b"")]


class Engine:
    """An engine, which counts its requests."""

    def __init__(self) -> None:
        self.requests = 0
        self.hits = 0
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def count(self, body: bytes) -> _Usage:
        """Counts a request for tokens."""
        prefix, prompt = body[_PREFIX], len(body) // _BYTES_PER_TOKEN
        is_hit = prefix in self._held
        self.requests += 1
        self.hits += is_hit
        self._held[prefix] = None
        self._held.move_to_end(prefix)
        if len(self._held) > _HELD_PREFIXES:
            self._held.popitem(last=False)
        return _Usage(prompt, prompt * 3 // 4 if is_hit else 0)


class Engines:
    """All engines. Their streams go on in the same steps."""

    def __init__(self, model: str, count: int) -> None:
        self.each = [Engine() for _ in range(count)]
        self._running: list[tuple[asyncio.Transport, Iterator[bytes]]] = []
        listed = {"id": model, "object": "model", "owned_by": "mock", "root": model, "max_model_len": 131_072}
        described = {"model_path": model, "served_model_name": model, "tokenizer_path": model, "is_generation": True}
        self._known = {
            "/v1/models": _whole({"object": "list", "data": [listed]}),
            "/health": _whole({}),
            "/version": _whole({"version": "0.20.0"}),
            # What SGLang's router asks.
            **dict.fromkeys(("/get_model_info", "/model_info"), _whole(described)),
            **dict.fromkeys(("/get_server_info", "/server_info"), _whole(described | {"dp_size": 1, "version": "0.5"})),
        }

    def got(self, path: str) -> bytes:
        """Returns the response to a GET."""
        if path == "/counts":
            return _whole(
                {"requests": [each.requests for each in self.each], "hits": [each.hits for each in self.each]}
            )
        return self._known.get(path) or _whole({}, "404 Not Found")

    def start(self, transport: asyncio.Transport, parts: list[bytes]) -> None:
        """Writes a response, a part in each step."""
        transport.write(parts[0])
        if len(parts) > 1:
            self._running.append((transport, iter(parts[1:])))

    async def run(self) -> None:
        """Makes steps until it is cancelled."""
        while True:
            await asyncio.sleep(_STEP_SECONDS)
            going_on = []
            for transport, parts in self._running:
                part = next(parts, None)
                if part is not None and not transport.is_closing():
                    transport.write(part)
                    going_on.append((transport, parts))
            self._running = going_on


class Connection(asyncio.Protocol):
    """A connection to an engine, with one request at a time."""

    def __init__(self, engines: Engines, engine: Engine) -> None:
        self._engines = engines
        self._engine = engine
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while (end := received.find(_END_OF_HEAD)) >= 0:
            declared = _LENGTH.search(received, 0, end + 2)
            begin = end + len(_END_OF_HEAD)
            size = begin + (int(declared[1]) if declared else 0)
            if len(received) < size:
                return
            method, _, rest = bytes(received[:end]).partition(b" ")
            body = bytes(received[begin:size])
            del received[:size]
            if method not in (b"GET", b"POST"):
                self._close()  # SGLang's router tries HTTP/2 first.
                return
            self._answer(method, rest.partition(b" ")[0].partition(b"?")[0].decode(), body)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _answer(self, method: bytes, path: str, body: bytes) -> None:
        assert self._transport is not None
        if method != b"POST":
            self._transport.write(self._engines.got(path))
            return
        used = self._engine.count(body) if path in ANSWERS else _Usage(0, 0)
        fields = _BODY.decode(body)
        tokens = fields.max_tokens or fields.max_completion_tokens or fields.max_output_tokens or 1
        self._engines.start(self._transport, _answer(path, tokens, fields.stream, used))


async def main(model: str, ports: list[int]) -> None:
    """Serves until it is stopped."""
    engines = Engines(model, len(ports))
    loop = asyncio.get_running_loop()
    for engine, port in zip(engines.each, ports, strict=True):
        await loop.create_server(lambda each=engine: Connection(engines, each), "127.0.0.1", port, backlog=1024)
    await engines.run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], [int(port) for port in sys.argv[2:]]))
