"""Bodies of a forwarded request for a prefill and a decode engine."""

from __future__ import annotations

import json

import pytest
from kvrouter.frontend.proxy.engine_request import can_share, decode_body, prefill_body, transfer_params
from kvrouter.v1.worker_pb2 import TransferParams

CHAT = b' {"model":"m","messages":[],"max_completion_tokens":50,"stream":true,"stream_options":{},"x":1.0}'
ROOM = TransferParams(
    format="sglang-json", payload=b'{"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}'
)


def test_a_prefill_has_one_token_and_no_stream_and_asks_for_parameters() -> None:
    body = json.loads(prefill_body(CHAT, None))
    assert body.pop("kv_transfer_params")["do_remote_decode"] is True
    assert body == {"model": "m", "messages": [], "max_completion_tokens": 1, "stream": False, "x": 1.0}
    assert json.loads(prefill_body(b'{"prompt":"a"}', None))["max_tokens"] == 1


def test_both_engines_get_the_same_room() -> None:
    first, second = json.loads(prefill_body(CHAT, ROOM)), json.loads(decode_body(CHAT, ROOM))
    assert "kv_transfer_params" not in first
    assert {name: first[name] for name in json.loads(ROOM.payload)} == json.loads(ROOM.payload)
    assert second == json.loads(CHAT) | json.loads(ROOM.payload)


def test_the_decode_engine_gets_the_body_and_the_parameters_as_they_are() -> None:
    params = transfer_params(b'{"choices":[],"kv_transfer_params":{"remote_block_ids":[[1, 2]],"new_field":1.50}}')
    assert params is not None
    body = decode_body(CHAT, params)
    assert b'"kv_transfer_params":{"remote_block_ids":[[1, 2]],"new_field":1.50}' in body
    assert body.endswith(CHAT.strip()[1:])
    assert decode_body(CHAT, None) is CHAT


@pytest.mark.parametrize("response", [b"", b"{}", b"garbage", b'{"kv_transfer_params":null}'])
def test_a_response_without_parameters_has_none(response: bytes) -> None:
    assert transfer_params(response) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CHAT, True),
        (b'{"prompt":"a","n":1}', True),
        (b'{"prompt":[1,2]}', True),
        (b'{"prompt":"a","n":2}', False),
        (b'{"prompt":"a","best_of":3}', False),
        (b'{"prompt":["a","b"]}', False),
        (b'{"prompt":[ [1],[2]]}', False),
        (b'{"prompt":"a","kv_transfer_params":{}}', False),
        (b'{"prompt":"a","bootstrap_room":5}', False),
        (b"[]", False),
        (b"{", False),
    ],
)
def test_requests_with_one_prompt_and_one_sequence_are_shared(body: bytes, expected: bool) -> None:
    assert can_share(body) is expected
