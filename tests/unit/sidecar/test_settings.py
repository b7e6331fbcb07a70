"""The options of a sidecar, and what each of its engines gets of them."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.runtime.config.settings import SettingsError
from kvrouter.runtime.config.sources import read_all
from kvrouter.sidecar.engine_options import EngineOptions, options_of_engines, options_of_pod, worker_id_of
from kvrouter.sidecar.settings import LocalEnginesSettings, SidecarSettings


def engines(*flags: str) -> list[EngineOptions]:
    settings: Any = read_all([SidecarSettings], flags, {})[0]
    return list(options_of_engines(settings))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ([], "engine"),
        (["--engine", "127.0.0.1:8000"], "expected http://host:port"),
        (["--engine", "http://user:word@e:1"], "--engine-keys-file"),
        (["--engine", "http://e:1", "--engine", "http://e:1"], "named twice"),
        (["--engine", "http://e:1,http://e:2", "--kv-events", "none"], "expected one for each of 2 engines"),
        (["--engine", "http://e:1", "--kv-replay", "tcp://e:1"], "--kv-events"),
        (["--engine", "http://e:1", "--kv-events", "e:1"], "expected tcp://host:port"),
        (["--engine", "http://e:1", "--state", "j"], "--worker-id"),
        (["--engine", "http://e:1", "--bootstrap-endpoint", "e"], "expected host:port"),
        (["--engine", "http://e:1", "--lora-ids", "a=b"], "expected number=name"),
        (["--engine-pods", "a:b:c:d"], "[NAMESPACE:]LABELS[:PORT]"),
        (["--inference-pool", "A"], "name of Kubernetes"),
        (["--engine-pods", "app=vllm", "--inference-pool", "qwen"], "name one of them"),
        (["--engine-pods", "app=vllm", "--bind", "0.0.0.0:7000"], "port 0"),
        (["--engine-pods", "app=vllm", "--advertise", "10.0.0.7:7000"], "port 0"),
    ],
)
def test_wrong_options_are_named(wrong: list[str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        engines(*wrong)
    assert named in str(caught.value)
    assert "word@" not in str(caught.value)


def test_further_engines_have_the_next_ids_and_ports() -> None:
    first, second = engines(
        *("--engine", "http://e:1", "--engine", "http://e:2/", "--worker-id", "7", "--bind", "0.0.0.0:9000"),
        *("--advertise", "h:9100", "--kv-events", "tcp://e:5,none"),
    )
    assert (first.worker_id, first.bind, first.advertise) == (7, "0.0.0.0:9000", "h:9100")
    assert (second.worker_id, second.bind, second.advertise) == (8, "0.0.0.0:9001", "h:9101")
    assert (first.overrides.kv_events, second.overrides.kv_events) == ("tcp://e:5", "none")
    assert second.url == "http://e:2"


def test_the_worker_of_a_pod_is_named_by_its_url_and_may_have_no_events() -> None:
    settings: Any = read_all([SidecarSettings], ["--engine-pods", "app=vllm", "--advertise", "10.0.0.7"], {})[0]
    options = options_of_pod(settings, "http://10.0.0.1:8000")
    assert (options.worker_id, options.bind) == (worker_id_of("http://10.0.0.1:8000/"), "127.0.0.1:0")
    assert (options.advertise, options.advertised_url) == ("10.0.0.7", "http://10.0.0.1:8000")
    assert not options.overrides.needs_events


@pytest.mark.parametrize(
    ("flags", "advertised"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--advertise", "10.0.0.7"], "http://10.0.0.7:8000"),
        (["--advertise", "10.0.0.7:9000"], "http://10.0.0.7:8000"),
        (["--advertise", "[fd00::7]"], "http://[fd00::7]:8000"),
        (["--engine-advertise", "https://engine"], "https://engine"),
    ],
)
def test_a_loopback_address_is_advertised_as_that_of_the_sidecar(flags: list[str], advertised: str) -> None:
    (engine,) = engines("--engine", "http://127.0.0.1:8000", *flags)
    assert engine.advertised_url == advertised


def test_another_address_is_advertised_as_it_is() -> None:
    (engine,) = engines("--engine", "http://engine:8000", "--advertise", "10.0.0.7")
    assert engine.advertised_url == "http://engine:8000"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--peer", "10.0.0.2:50051"], "--engine-pods"),
        (["--engine", "http://e:1", "--peer", "10.0.0.2"], "host:port"),
        (["--engine", "http://e:1", "--engine-replay", "tcp://e:1"], "--engine-events"),
    ],
)
def test_wrong_options_of_a_process_without_a_broker_are_named(wrong: list[str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_all([LocalEnginesSettings], wrong, {})
    assert named in str(caught.value)
