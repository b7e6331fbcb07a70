"""What an engine says of itself and what the options say make its description."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.engines.relay.engine_sockets import Endpoints
from kvrouter.engines.servers.description import Discovered, NotDiscovered, Overrides, at_host, describe
from kvrouter.engines.servers.metrics_text import read_samples
from kvrouter.engines.servers.sglang.discovery import InternalState, KvEvents, ServerInfo, take
from kvrouter.engines.servers.vllm.discovery import EventSocket, read_cache_config, read_event_sockets

URL = "http://e:8000"


def found(**values: Any) -> Discovered:
    known: dict[str, Any] = {"model": "m", "block_size": 16, "events": {0: Endpoints("tcp://e:1")}}
    return Discovered("vllm", **(known | values))


def test_options_count_more_than_what_the_engine_says() -> None:
    given = Overrides(
        model="other",
        block_size=32,
        dp_size=2,
        total_blocks=5,
        kv_events="tcp://x:1",
        kv_replay="tcp://x:11",
        max_model_len=9,
        max_sequences=8,
        role="prefill",
        tokenizer="t",
        bootstrap_endpoint="b:1",
    )
    engine = describe(URL, "e", found(), given)
    assert (engine.model, engine.block_size, engine.max_model_len, engine.role) == ("other", 32, 9, "prefill")
    assert engine.ranks == {0: 5, 1: 5}
    assert engine.max_sequences == 8
    assert engine.events[1] == Endpoints("tcp://x:2", "tcp://x:12")
    assert (engine.tokenizer, engine.bootstrap_endpoint) == ("t", "b:1")


@pytest.mark.parametrize(
    ("values", "missing", "option"),
    [
        ({"model": None}, "model", "--model"),
        ({"block_size": None, "problems": {"block_size": "status 404"}}, "block size (status 404)", "--block-size"),
        ({"events": None}, "events", "--kv-events"),
        ({"events": {}}, "KV events disabled", "--kv-events"),
        ({"ranks": {0: 1, 1: 1}}, "expected sockets of ranks [0, 1], received those of [0]", "--kv-events"),
    ],
)
def test_what_is_missing_is_named_with_its_option(values: dict[str, Any], missing: str, option: str) -> None:
    with pytest.raises(NotDiscovered) as caught:
        describe(URL, "e", found(**values), Overrides())
    assert missing in str(caught.value)
    assert option in str(caught.value)
    assert URL in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"events": {}}, "start it with --kv-events-config"),
        ({"events": None, "problems": {"events": "status 404"}}, "status 404"),
    ],
)
def test_an_engine_without_events_is_accepted_where_they_are_not_needed(values: dict[str, Any], reason: str) -> None:
    engine = describe(URL, "e", found(**values), Overrides(needs_events=False))
    assert engine.events == {}
    assert reason in engine.why_no_events
    assert describe(URL, "e", found(), Overrides(needs_events=False)).why_no_events == ""
    assert describe(URL, "e", found(), Overrides(kv_events="none")).why_no_events == ""


def test_an_engine_may_publish_no_events_if_that_is_intended() -> None:
    assert describe(URL, "e", found(events={}), Overrides(kv_events="none")).events == {}


def test_adapters_that_come_and_go_change_nothing() -> None:
    before, after = (describe(URL, "e", found(lora_names=names), Overrides()) for names in ((), ("a",)))
    assert before == after
    assert before.changes(describe(URL, "e", found(block_size=32), Overrides())) == {"block_size": "16 -> 32"}


@pytest.mark.parametrize(
    ("endpoint", "reached"),
    [
        ("tcp://*:5557", "tcp://e:5557"),
        ("tcp://0.0.0.0:5557", "tcp://e:5557"),
        ("tcp://[::]:5557", "tcp://e:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("ipc:///tmp/s", "ipc:///tmp/s"),
        ("", ""),
    ],
)
def test_a_wildcard_is_the_engines_host(endpoint: str, reached: str) -> None:
    assert at_host(endpoint, "e") == reached
    assert at_host("tcp://*:1", "fd00::1") == "tcp://[fd00::1]:1"


def test_the_cache_of_each_vllm_rank_is_read_from_the_metrics() -> None:
    page = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None",engine="1"} 1.0
"""
    engine = Discovered("vllm")
    read_cache_config(engine, read_samples(page, {"vllm:cache_config_info"})[0])
    assert (engine.block_size, engine.ranks) == (16, {0: 100, 1: None})


def test_vllm_ranks_with_different_block_sizes_are_refused() -> None:
    page = b'vllm:cache_config_info{block_size="16"} 1\nvllm:cache_config_info{block_size="32"} 1\n'
    engine = Discovered("vllm")
    read_cache_config(engine, read_samples(page, {"vllm:cache_config_info"})[0])
    assert engine.block_size is None
    assert "received 2" in engine.problems["block_size"]


def test_the_event_sockets_of_vllm() -> None:
    listed = [EventSocket("tcp://*:1", 0, "tcp://*:11", "kv"), EventSocket("tcp://h:2", 1, None, None)]
    by_rank = {0: EventSocket("tcp://*:1", None, "tcp://*:11", "kv"), 1: EventSocket("tcp://h:2")}
    for sockets in (listed, by_rank):
        assert read_event_sockets(sockets, "e") == {
            0: Endpoints("tcp://e:1", "tcp://e:11", "kv"),
            1: Endpoints("tcp://h:2", "", ""),
        }


def test_ranks_of_vllm_that_publish_nothing_have_no_sockets() -> None:
    silent = [EventSocket("tcp://*:1", enable_kv_cache_events=False), EventSocket("tcp://*:1", publisher="null")]
    assert [read_event_sockets([each], "e") for each in silent] == [{}, {}]


def test_what_sglang_says_of_itself() -> None:
    engine = Discovered("sglang")
    info = ServerInfo(
        model_path="org/m",
        served_model_name="m",
        page_size=1,
        dp_size=2,
        max_total_num_tokens=1000,
        disaggregation_mode="prefill",
        disaggregation_bootstrap_port=8998,
        kv_events=KvEvents(5557, replay_endpoint_port_base=6557, block_size=16, dp_size=2, topic="t"),
    )
    take(engine, info, "e")
    described = describe(URL, "e", engine, Overrides())
    assert (described.model, described.tokenizer, described.block_size) == ("m", "org/m", 16)
    assert described.ranks == {0: 62, 1: 62}
    assert described.events[1] == Endpoints("tcp://e:5558", "tcp://e:6558", "t")
    assert (described.role, described.bootstrap_endpoint) == ("prefill", "e:8998")
    assert not described.smaller_priority_first
    info.schedule_low_priority_values_first = True
    take(engine, info, "e")
    assert describe(URL, "e", engine, Overrides()).smaller_priority_first


def test_an_sglang_server_that_publishes_nothing() -> None:
    engine = Discovered("sglang")
    take(engine, ServerInfo(model_path="m", page_size=16), "e")
    with pytest.raises(NotDiscovered, match="--kv-events"):
        describe(URL, "e", engine, Overrides())


@pytest.mark.parametrize(
    ("info", "each"),
    [
        ({"max_running_requests": 64, "dp_size": 2}, 32),
        ({"internal_states": (InternalState(31), InternalState(30)), "max_running_requests": 64, "dp_size": 2}, 30),
        ({"internal_states": (InternalState(),)}, None),
        ({}, None),
    ],
)
def test_the_requests_that_each_rank_of_sglang_runs_at_once(info: dict[str, Any], each: int | None) -> None:
    engine = Discovered("sglang")
    take(engine, ServerInfo(model_path="m", page_size=16, **info), "e")
    assert describe(URL, "e", engine, Overrides(kv_events="none")).max_sequences == each
