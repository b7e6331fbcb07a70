"""A worker's settings refuse what cannot work, naming the setting."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.net.etcd import InvalidEndpoint, parse_endpoints
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.v1.common_pb2 import Tier, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import StorageTier


def config(**settings: Any) -> WorkerConfig:
    known: dict[str, Any] = {"component": ComponentName("ns", "pool"), "model": "m", "block_size": 16}
    return WorkerConfig(**(known | settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("worker_id", -1),
        ("worker_id", 1 << 64),
        ("model", ""),
        ("ranks", {}),
        ("ranks", {-1: 5}),
        ("etcd", "nowhere"),
        ("etcd", "ftp://host:2379"),
        ("nats", "127.0.0.1:4222"),
        ("bind", "127.0.0.1"),
        ("bind", "127.0.0.1:99999"),
        ("bind", "0.0.0.0:5000"),
        ("heartbeat_seconds", 0),
        ("lease_ttl_seconds", 1),
        ("buffer_events", 0),
        ("buffer_bytes", 100),
        ("drain_seconds", -1),
        ("component", "kvrouter/llama"),
        ("ranks", [0, 1]),
        ("ranks", {"0": 5}),
        ("ranks", {0: 0}),
        ("ranks", {0: 1 << 63}),
        ("max_batched_tokens", 0),
        ("max_sequences", 0),
        ("vocabulary_size", 0),
        ("max_sequences", "8"),
        ("model", None),
        ("block_size", "16"),
        ("worker_id", 1.5),
        ("heartbeat_seconds", None),
        ("openai_endpoint", None),
        ("engine", None),
        ("labels", ["zone"]),
        ("lora_names", "adapter"),
        ("nats", None),
        ("storage_tiers", [StorageTier(tier=Tier.TIER_HOST)]),
        ("storage_tiers", (StorageTier(tier=Tier.TIER_DEVICE),)),
        ("storage_tiers", (StorageTier(tier=Tier.TIER_DISK), StorageTier(tier=Tier.TIER_DISK))),
        ("storage_tiers", (StorageTier(tier=Tier.TIER_HOST, load_gb_per_second=float("nan")),)),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=name):
        config(**{name: value})


@pytest.mark.parametrize(
    ("bind", "advertise", "endpoint"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:7"),
        ("0.0.0.0:0", "host", "host:7"),
        ("0.0.0.0:0", "host:99", "host:99"),
        ("[::1]:0", "", "[::1]:7"),
        ("[::]:0", "[fd00::1]", "[fd00::1]:7"),
    ],
)
def test_the_endpoint_is_what_others_reach(bind: str, advertise: str, endpoint: str) -> None:
    assert config(bind=bind, advertise=advertise).endpoint(7) == endpoint


def test_a_registration_says_where_the_engine_itself_is_reached() -> None:
    tiers = (StorageTier(tier=Tier.TIER_HOST), StorageTier(tier=Tier.TIER_DISK, load_gb_per_second=3))
    chosen = config(
        openai_endpoint="http://e:8000",
        bootstrap_endpoint="e:8998",
        tokenizer="org/model",
        engine="vllm",
        storage_tiers=tiers,
    )
    registration = chosen.registration(
        endpoint="h:1", incarnation=1, transport=Transport.TRANSPORT_DURABLE, registered_unix_ns=1
    )
    assert registration.openai_endpoint == "http://e:8000"
    assert registration.bootstrap_endpoint == "e:8998"
    assert registration.tokenizer == "org/model"
    assert registration.engine == "vllm"
    assert tuple(registration.storage_tiers) == tiers


def test_a_registration_leaves_out_what_is_unknown() -> None:
    unknown = config().registration(
        endpoint="h:1", incarnation=1, transport=Transport.TRANSPORT_DURABLE, registered_unix_ns=1
    )
    for name in ("max_batched_tokens", "max_sequences", "vocabulary_size"):
        assert not unknown.HasField(name)
    assert not unknown.ranks[0].HasField("total_blocks")
    assert unknown.heartbeat_ms == 5000


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "\u202egnp", "m" * 1025])
def test_names_that_readers_refuse_are_refused_at_the_start(name: str) -> None:
    for change in ({"model": name}, {"lora_names": (name,)}, {"labels": {name: ""}}, {"labels": {"zone": name}}):
        with pytest.raises(InvalidConfig, match="expected"):
            config(**change)


def test_drawn_ids_differ_and_fit_in_json() -> None:
    drawn = {config().worker_id for _ in range(100)}
    assert len(drawn) == 100
    assert max(drawn) < 1 << 53


def test_endpoints() -> None:
    assert parse_endpoints("a:1, http://b:2/,[::1]:3") == (("http", "a", 1), ("http", "b", 2), ("http", "[::1]", 3))
    assert parse_endpoints("https://a:1") == (("https", "a", 1),)
    for wrong in ("", "a", "a:b", "ftp://a:1", "http://a:1/path", "http://user:secret@a:1"):
        with pytest.raises(InvalidEndpoint):
            parse_endpoints(wrong)
