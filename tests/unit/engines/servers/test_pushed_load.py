"""Messages on the sockets for load, as SGLang publishes them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvrouter.engines.events.zmq_frames import MalformedMessage
from kvrouter.engines.servers.description import Discovered, EngineDescription
from kvrouter.engines.servers.sglang.api import read_load_stat
from kvrouter.engines.servers.sglang.discovery import KvEvents, ServerInfo, take

ENGINE = EngineDescription(
    kind="sglang",
    model="m",
    block_size=16,
    ranks={0: 100, 1: 200},
    events={},
    max_model_len=0,
    role="both",
    tokenizer="",
    bootstrap_endpoint="",
)
STAT = ["LoadStat", 3, 2, 33, 4096, 1, 500, 533, 64, 10_000, 7]


def test_a_load_stat_is_read() -> None:
    rank, load = read_load_stat(msgspec.msgpack.encode(STAT), ENGINE)
    assert rank == 1
    assert (load.running_requests, load.waiting_requests, load.prefill_tokens) == (3, 2, 500)
    assert (load.active_blocks, load.total_blocks) == (3, 200)


def test_fields_of_later_and_earlier_versions_are_no_problem() -> None:
    assert read_load_stat(msgspec.msgpack.encode([*STAT, "new"]), ENGINE)[0] == 1
    _, load = read_load_stat(msgspec.msgpack.encode(STAT[:6]), ENGINE)
    assert (load.running_requests, load.prefill_tokens) == (3, 0)


@pytest.mark.parametrize(
    "message",
    [
        [],
        ["Other", *STAT[1:]],
        STAT[:4],
        ["LoadStat", -1, *STAT[2:]],
        ["LoadStat", 1.5, *STAT[2:]],
        ["LoadStat", 1 << 40, *STAT[2:]],
        [*STAT[:5], 7],
        {"running": 1},
        None,
    ],
)
def test_anything_else_is_refused(message: Any) -> None:
    with pytest.raises(MalformedMessage):
        read_load_stat(msgspec.msgpack.encode(message), ENGINE)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_load_stat(payload, ENGINE)


def test_the_sockets_are_those_that_the_server_names() -> None:
    events = KvEvents(5557, dp_size=2, load_endpoint_port_base=5559, load_topic="load")
    found = Discovered("sglang")
    take(found, ServerInfo("m", page_size=16, kv_events=events), "engine")
    assert {rank: (each.events, each.topic) for rank, each in found.load_sockets.items()} == {
        0: ("tcp://engine:5559", "load"),
        1: ("tcp://engine:5560", "load"),
    }
