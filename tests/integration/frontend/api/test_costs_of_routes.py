"""Hostile bodies on the routes for agents, and on those that only pass on: they cost what they cost as a chat, or less.

Memory and stalls are measured as in ``test_costs``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.engines.routes import PASSED_ROUTES

from .test_costs import (
    HOSTILE_BODIES,
    MODEL,
    REFUSED_BYTES,
    STALL_UNITS,
    Process,
    costs_of,
    filled,
    pytestmark,
    routing_to,
    until_served,
)

__all__ = ["pytestmark"]

CHAT_BYTES = 16
"""Most memory for each byte of a body that is read as a chat: a chat of small objects, or of characters of four bytes,
takes as much."""
PARTS_SIZE = 6 << 20
PROMPTS = {"/v1/messages": b"messages", "/v1/messages/count_tokens": b"messages", "/v1/responses": b"input"}
"""Fields with the prompt, by route; of others it is their input."""
PASSED = ("/v1/messages", "/v1/responses", "/v1/embeddings")
OTHERS = [pytest.param(path, marks=pytest.mark.full) for path in PASSED_ROUTES if path not in PASSED]

START = b'{"model": "mock-model", "max_tokens": 1, "prompt": '
MESSAGE = START + b'[{"role":"user","content":['
SMALL_PARTS = {
    "messages": (START + b"[", b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}]}'),
    "blocks": (MESSAGE, b'{"type":"text","text":"a"},', b'{"type":"text","text":"a"}]}]}'),
    "input parts": (MESSAGE, b'{"type":"input_text","text":"a"},', b'{"type":"input_text","text":"a"}]}]}'),
    "calls": (
        START + b'[{"role":"assistant","content":[',
        b'{"type":"tool_use","id":"a","name":"a","input":{}},',
        b'{"type":"text","text":"a"}]}]}',
    ),
    "items": (START + b"[", b'{"type":"reasoning","summary":[]},', b'{"role":"user","content":"a"}]}'),
    "tools": (
        START + b'[{"role":"user","content":"a"}],"tools":[',
        b'{"name":"a","input_schema":{}},',
        b'{"name":"a","input_schema":{}}]}',
    ),
    "functions": (
        START + b'[{"role":"user","content":"a"}],"tools":[',
        b'{"type":"function","name":"a"},',
        b'{"type":"function","name":"a"}]}',
    ),
}
LONG = {
    "a long text": filled(START + b'[{"role":"user","content":"', b"word ", b'"}]}'),
    "long arguments": filled(
        START + b'[{"type":"function_call","call_id":"a","name":"b","arguments":"{\\"a\\":[', b"[],", b'[]]}"}]}'
    ),
    "a long key": filled(START + '[1], "prompt_cache_key": "\U0001f600'.encode(), b"a", b'"}'),
    "options of the template": filled(START + b'[1], "chat_template_kwargs": {"a": [', b"[],", b"[]]}}"),
}


class Engine(BaseHTTPRequestHandler):
    """Reads a body and answers at once."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._say({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "a"}
        self._say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _say(self, fields: object) -> None:
        body = json.dumps(fields).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def forwarding(directory: Path, engine: str) -> Iterator[Process]:
    """A Frontend with a tokenizer before a server with an OpenAI API, of an engine or of none that is known."""
    write_small_tokenizer(directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    listed = directory / "workers.toml"
    worker = f'{{endpoint = "http://127.0.0.1:{server.server_port}"{engine and f", engine = {engine!r}"}}}'
    listed.write_text(f'[[components]]\nname = "workers"\nmodel = "{MODEL}"\nworkers = [{worker}]\n')
    try:
        tokenizers = ("--tokenizers", f"{MODEL}={directory}")
        with routing_to("--static-workers", str(listed), options=tokenizers) as process:
            until_served(process.http, text_status=200)
            yield process
    finally:
        server.shutdown()


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with forwarding(tmp_path_factory.mktemp("passing"), "vllm") as process:
        yield process


@pytest.fixture(scope="module")
def translating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with forwarding(tmp_path_factory.mktemp("translating"), "") as process:
        yield process


@pytest.fixture(scope="module")
def over_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory, worker = tmp_path_factory.mktemp("tokens"), f"127.0.0.1:{free_port()}"
    write_small_tokenizer(directory)
    text = ["--tokenizer", str(directory), "--vocabulary-size", str(VOCABULARY_SIZE)]
    mocker = ["--no-registration", "--bind", worker, "--http-bind", "", "--speed", "1000000", *text]
    engine = subprocess.Popen([sys.executable, "-m", "kvrouter.mocker", *mocker], stderr=subprocess.DEVNULL)
    listed = ("--static-workers", worker, "--static-model", MODEL)
    try:
        with routing_to(*listed, options=("--tokenizers", f"{MODEL}={directory}")) as process:
            until_served(process.http, text_status=200)
            yield process
    finally:
        engine.kill()
        engine.wait()


async def check(frontend: Process, path: str) -> None:
    field = PROMPTS.get(path, b"input")
    small = {shape: filled(*parts, size=PARTS_SIZE) for shape, parts in SMALL_PARTS.items()}
    for shape, body in (HOSTILE_BODIES | LONG | small).items():
        body = body.replace(b'"prompt"', b'"%b"' % field)
        # What earlier bodies left in caches, which are bounded, is not this body's.
        frontend.at_rest = 0
        status, said, memory, stall = await costs_of(frontend, body, path)
        assert status in (200, 400, 413), (shape, said)
        most = CHAT_BYTES if shape in small or status == 200 else REFUSED_BYTES
        assert memory <= most, (shape, status)
        assert stall <= STALL_UNITS, (shape, status)


@pytest.mark.full
@pytest.mark.parametrize("path", [*PASSED, *OTHERS])
async def test_of_bodies_that_are_passed_on(passing: Process, path: str) -> None:
    await check(passing, path)


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_of_bodies_that_become_chats_for_engines(translating: Process, path: str) -> None:
    await check(translating, path)


@pytest.mark.parametrize("path", PROMPTS)
async def test_of_bodies_for_workers_that_receive_tokens(over_tokens: Process, path: str) -> None:
    await check(over_tokens, path)
