"""One id names the conversation of a request, on whatever path it comes."""

from __future__ import annotations

import pytest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.conversation_ids import ConversationIds
from kvrouter.frontend.settings import SESSION_HEADERS
from prometheus_client import CollectorRegistry


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def conversations(registry: CollectorRegistry) -> ConversationIds:
    return ConversationIds(SESSION_HEADERS, FrontendMetrics(registry).ignored_sessions)


def test_the_field_comes_first_then_the_headers_in_order_then_the_cache_key(conversations: ConversationIds) -> None:
    headers = {name: f"of {name}" for name in SESSION_HEADERS}
    assert conversations.of(headers, conversation_id="talk", prompt_cache_key="key") == "talk"
    for name in SESSION_HEADERS:
        assert conversations.of(headers, prompt_cache_key="key") == f"of {name}"
        del headers[name]
    assert conversations.of(headers, prompt_cache_key="key") == "key"
    assert conversations.of(headers) == ""


@pytest.mark.parametrize("odd", ["x" * 257, "é" * 129, "a\nb", "a\x7f", "\udcff"])
def test_a_long_or_unprintable_id_is_ignored_and_counted(
    conversations: ConversationIds, registry: CollectorRegistry, odd: str
) -> None:
    headers = {"session-id": odd, "thread-id": " thread "}
    assert conversations.of(headers, conversation_id=odd, prompt_cache_key=odd) == "thread"
    assert conversations.of({}, prompt_cache_key=odd) == ""
    counted = {
        source: registry.get_sample_value("kvrouter_frontend_ignored_sessions_total", {"source": source})
        for source in ("conversation_id", "header", "prompt_cache_key")
    }
    assert counted == {"conversation_id": 1.0, "header": 1.0, "prompt_cache_key": 1.0}


def test_the_longest_id_and_other_scripts_are_kept(conversations: ConversationIds) -> None:
    for value in ("x" * 256, "é" * 128, "会话"):
        assert conversations.of({}, conversation_id=value) == value


def test_headers_are_those_of_the_setting(registry: CollectorRegistry) -> None:
    conversations = ConversationIds(("X-Chat",), FrontendMetrics(registry).ignored_sessions)
    assert conversations.of({"x-chat": "mine", "session-id": "other"}) == "mine"
    assert ConversationIds((), FrontendMetrics(CollectorRegistry()).ignored_sessions).of({"session-id": "a"}) == ""
