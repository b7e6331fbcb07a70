"""The usage that the Frontend requests of a stream for itself."""

from __future__ import annotations

import json

import pytest
from kvrouter.frontend.proxy.engine_body import EngineBody
from kvrouter.frontend.proxy.usage import UsageRemover

OTHERS = [
    b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}],"usage":null}\n\n',
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{}}],"usage":{"completion_tokens":1}}\r\n\r\n',
    b'data: {"usage": 5}\n\n',
    b"data: [DONE]\n\n",
]
USAGE = b'data: {"id": "x", "choices": [], "usage": {"completion_tokens": 9}}\n\n'


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
@pytest.mark.parametrize("rest", [b"", b'data: {"cut off'])
def test_only_the_event_of_the_usage_is_removed(size: int, rest: bytes) -> None:
    remover = UsageRemover()
    sent = b"".join([*OTHERS[:-1], USAGE, OTHERS[-1], rest])
    passed = b"".join(remover.remove(sent[at : at + size]) for at in range(0, len(sent), size)) + remover.rest()
    assert passed == b"".join(OTHERS) + rest


def test_an_event_without_end_is_not_kept_back_for_ever() -> None:
    assert len(UsageRemover().remove(b"x" * (2 << 20))) == 2 << 20


@pytest.mark.parametrize("body", [b' {"stream": true, "unknown": [1]}', b'{"stream":1,"model":"m"}'])
def test_a_stream_requests_its_usage(body: bytes) -> None:
    requested = EngineBody(body).with_usage()
    assert requested is not None
    assert json.loads(requested) == json.loads(body) | {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "body", [b"{}", b'{"stream": false}', b'{"stream": true, "stream_options": null}', b"[", b'{"stream": "\xff"}']
)
def test_other_bodies_stay_as_they_are(body: bytes) -> None:
    assert EngineBody(body).with_usage() is None
