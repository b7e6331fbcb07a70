"""The metrics of OpenTelemetry's GenAI conventions, as a scrape of a whole system finds them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from kvrouter.frontend.request.gen_ai import operation_of
from prometheus_client.parser import text_string_to_metric_families

from ..gateway import MODEL, System
from .test_forwarding import chat, post, start_engine

NAMES = (
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    "gen_ai_client_token_usage",
)


async def scraped(system: System, suffix: str, operation: str = "text_completion") -> dict[tuple[str, ...], float]:
    """Returns the samples of the metrics with a suffix, of an operation, by name and further label."""
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/metrics") as response:
        text = await response.text()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples if each.value]
    found = {}
    for sample in samples:
        name, labels = sample.name.removesuffix(f"_{suffix}"), dict(sample.labels)
        if name not in NAMES or name == sample.name or labels.pop("gen_ai_operation_name") != operation:
            continue
        assert (labels.pop("gen_ai_provider_name"), labels.pop("gen_ai_request_model")) == ("kvrouter", MODEL)
        found[(name.removeprefix("gen_ai_"), *filter(None, labels.values()))] = sample.value
    return found


async def complete(system: System, **fields: Any) -> int:
    body = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 5} | fields
    async with aiohttp.ClientSession() as http, http.post(f"http://{system.http}/v1/completions", json=body) as got:
        await got.read()
        return got.status


async def test_requests_are_counted_with_their_tokens(system: System) -> None:
    await system.start_worker(1)
    assert [await complete(system), await complete(system, max_tokens=1, stream=True)] == [200, 200]
    await system.until_idle()
    assert await scraped(system, "count") == {
        ("server_request_duration_seconds",): 2,
        ("server_time_to_first_token_seconds",): 2,
        ("server_time_per_output_token_seconds",): 1,
        ("client_token_usage", "input"): 2,
        ("client_token_usage", "output"): 2,
    }
    sums = await scraped(system, "sum")
    assert (sums["client_token_usage", "input"], sums["client_token_usage", "output"]) == (80, 6)
    whole, first = sums["server_request_duration_seconds",], sums["server_time_to_first_token_seconds",]
    assert 0 < first <= whole


async def test_a_failed_request_has_the_code_of_its_error_and_no_times(system: System) -> None:
    system.wait_for_no_restart()
    await system.start_worker(1)
    await system.stop_worker(1)
    assert await complete(system) == 503
    assert await scraped(system, "count") == {("server_request_duration_seconds", "UNAVAILABLE"): 1}


async def test_forwarded_requests_count_under_the_operation_of_their_route(system: System) -> None:
    async with AsyncExitStack() as stack:
        await start_engine(system, stack, 1)
        assert (await post(system, chat()))[0].status == 200
        await system.until_idle()
        # Its prompt is not tokenized here, and this engine does not report its length.
        assert await scraped(system, "count", "chat") == {
            ("server_request_duration_seconds",): 1,
            ("server_time_to_first_token_seconds",): 1,
            ("client_token_usage", "output"): 1,
        }
        assert (await scraped(system, "sum", "chat"))["client_token_usage", "output"] == 7


def test_routes_have_the_operations_of_the_conventions() -> None:
    routes = ("/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings", "/v2/rerank")
    assert [*map(operation_of, routes)] == ["chat", "chat", "text_completion", "embeddings", "rerank"]
