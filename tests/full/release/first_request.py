"""Routes a first request: ``first_request.py BIN``, a folder with the commands. Needs Python's own library only.

A simulated vLLM server and ``kvrouter serve --engine`` run until the response has come.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

ENGINE, ROUTER = 8100, 8000
SECONDS = 120
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:6557",
}
BODY = {"model": "m", "prompt": list(range(64)), "max_tokens": 4}


def send(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the response and the worker that it came from."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{ROUTER}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response), response.headers["x-kvrouter-worker"]


def first_response() -> tuple[dict[str, Any], str]:
    """Waits until the router answers."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return send(BODY)
        except (urllib.error.URLError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def main(programs: str) -> None:
    environment = {**os.environ, "KVROUTER_CORE": "native"}
    engine = (f"{programs}/kvrouter-mocker", "--openai", "--bind", f"127.0.0.1:{ENGINE}", "--model", "m")
    router = (f"{programs}/kvrouter", "serve", "--engine", f"http://127.0.0.1:{ENGINE}", "--port", str(ROUTER))
    with (
        subprocess.Popen([*engine, "--kv-events-config", json.dumps(EVENTS)], env=environment) as mocker,
        subprocess.Popen(router, env=environment) as serving,
    ):
        try:
            response, worker = first_response()
            assert worker, "the router names no worker"
            assert len(response["choices"]) == 1, response
            sys.stdout.write(f"routed to {worker}\n")
        finally:
            serving.terminate()
            mocker.terminate()
        assert serving.wait(60) == 0


main(sys.argv[1])
