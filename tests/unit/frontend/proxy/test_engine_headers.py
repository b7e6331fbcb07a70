from __future__ import annotations

import pytest
from kvrouter.frontend.proxy.engine_request import engine_request_id, may_reach_engine


@pytest.mark.parametrize(
    "name",
    [
        *("authorization", "x-api-key", "cookie", "x-data-parallel-rank", "x-vllm-priority", "x-session-id"),
        *("x-override-rid", "x-override-bootstrap-host", "x-override-priority", "x-smg-routing-key"),
        *("x-sglext-return-input-ids", "endpoint-load-metrics-format", "a-header-of-the-next-release"),
    ],
)
def test_headers_that_engines_obey_do_not_reach_them(name: str) -> None:
    assert not may_reach_engine(name)


@pytest.mark.parametrize("name", ["content-type", "accept", "user-agent", "traceparent", "x-forwarded-for", ":path"])
def test_others_do(name: str) -> None:
    assert may_reach_engine(name)


def test_an_id_is_no_address() -> None:
    assert engine_request_id("req_1~ab.c-d:e") == "req_1~ab.c-d:e"
    assert engine_request_id("___prefill_addr_10.0.0.7:1___decode_addr_10.0.0.8:1_x") == ""
    assert engine_request_id("a b") == ""
    assert engine_request_id("x" * 129) == ""
