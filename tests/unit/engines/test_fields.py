"""The lists of fields against the request schemas of the engines' releases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kvrouter.engines.fields import (
    ENGINES,
    HARMLESS,
    HARMLESS_OPTIONS,
    INTERNAL,
    ROUTED,
    EngineName,
    has_salt,
    shown_failure,
)

SCHEMAS: dict[EngineName, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("engine_schemas.json").read_text()
)
"""Fields of requests by engine and path: vLLM 0.33.0, SGLang 0.5.23, TensorRT-LLM's server of 2026."""
ROUTES = [(engine, path) for engine, paths in SCHEMAS.items() for path in paths]
_SENSITIVE = re.compile(
    r"transfer|bootstrap|disagg|salt|extra_key|kv_|cache_report|prefix_cache|lora|rank|priority|processor|session|custom"
    r"|xargs|embed(s|_over)|hidden_states|routed|^rid$|request_id|chat_template$|conversation|previous_response|hash"
)
_NO_SECRETS = {"prompt_cache_key", "input", "dimensions", "embed_dtype", "routed_experts"}


@pytest.mark.parametrize(("engine", "path"), ROUTES)
def test_every_sensitive_field_of_an_engine_is_internal(engine: EngineName, path: str) -> None:
    sensitive = {name for name in SCHEMAS[engine][path] if _SENSITIVE.search(name)} - _NO_SECRETS
    assert sensitive <= ENGINES[engine].internal


@pytest.mark.parametrize("path", HARMLESS)
def test_no_harmless_field_is_internal_to_any_engine(path: str) -> None:
    assert HARMLESS[path] & INTERNAL <= ROUTED
    assert not HARMLESS_OPTIONS & INTERNAL


@pytest.mark.parametrize("engine", ENGINES)
def test_no_option_of_a_client_is_one_that_the_sidecar_sets(engine: EngineName) -> None:
    assert not HARMLESS_OPTIONS & ENGINES[engine].set_by_worker


@pytest.mark.parametrize(("engine", "path"), ROUTES)
def test_salted_paths_have_the_field(engine: EngineName, path: str) -> None:
    assert not has_salt(engine, path) or "cache_salt" in SCHEMAS[engine][path]


def test_paths_without_the_field_are_not_salted() -> None:
    assert not has_salt("vllm", "/v1/messages")
    assert not has_salt("sglang", "/v1/messages")
    assert not has_salt("tensorrt-llm", "/v1/completions")
    assert not has_salt("", "/v1/completions")
    assert not has_salt("llama.cpp", "/v1/completions")


def test_a_failure_that_quotes_internal_fields_is_not_shown() -> None:
    assert shown_failure("max_tokens is too large") == "max_tokens is too large"
    assert "10.0.0.7" not in shown_failure("1 validation error: {'kv_transfer_params': {'remote_host': '10.0.0.7'}}")


def test_the_reference_lists_all_fields() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "openai-fields.md").read_text()
    listed = page.partition("## Forwarded requests with authentication")[2]
    permitted, internal = listed.split("Everything else is refused")
    names = {name for names in HARMLESS.values() for name in names}
    assert set(re.findall(r"`(\w+)`", permitted)) == names
    assert set(re.findall(r"`(\w+)`", internal)) == INTERNAL - ROUTED
