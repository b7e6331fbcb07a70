"""Fields of requests to engines: those of clients, and those of kvrouter and operators only.

The lists follow the request schemas of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.3. With authentication, a field
not listed as harmless is refused, so a field a later release adds is refused too until it is listed here.

Some fields have forms of their own: the salt of an engine, which knows no tenants, stands for tenant and salt together,
and each engine has a format for the parameters with which it hands KV blocks over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args
from urllib.parse import quote, unquote

from kvrouter.v1.common_pb2 import BlockScope

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
"""An engine, as workers register it."""

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
EMBEDDINGS: Final = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class EngineFields:
    """Fields of one engine's requests besides prompt and sampling."""

    internal: frozenset[str]
    """Fields of kvrouter and operators only: transfer, isolation, adapter, priority, rank, processors, sessions,
    ids. In any body, and in options and parameters within it."""
    set_by_worker: frozenset[str]
    """Options the sidecar sets itself for each request, so they never come from the client's options."""
    salted_paths: frozenset[str]
    """Paths of its API at which every supported release separates caches by ``cache_salt``."""


_VLLM = EngineFields(
    internal=frozenset(
        {
            *("kv_transfer_params", "ec_transfer_params", "cache_salt", "session_id", "priority", "request_id"),
            *("skip_reading_prefix_cache", "kv_cache_report_mode", "data_parallel_rank", "vllm_xargs", "extra_args"),
            *("lora_request", "lora_name", "lora_path", "lora_int_id", "logits_processors", "mm_processor_kwargs"),
            *("media_io_kwargs", "mm_payload", "return_mm_kwargs", "prompt_embeds", "features", "content_parts"),
            *("chat_template", "guided_decoding_backend", "watermarking", "previous_response_id", "background"),
            *("previous_input_messages", "enable_response_messages", "routed_experts_prompt_start", "output_kind"),
            # Releases differ in whether the salt holds for beams.
            "use_beam_search",
            *("trace_decode_token_ids", "return_weight_versions", "late_chunking_params", "sampling_params"),
            *("reasoning_parser_kwargs", "parse_context", "output_mode", "skip_clone", "token_ids"),
        }
    ),
    set_by_worker=frozenset(
        {
            *("model", "prompt", "prompt_embeds", "add_special_tokens", "stream", "stream_options", "return_token_ids"),
            *("return_tokens_as_token_ids", "logprobs", "max_tokens", "n", "best_of", "use_beam_search", "echo"),
            *("suffix", "request_id", "priority", "cache_salt", "session_id", "kv_transfer_params"),
            *("ec_transfer_params", "truncate_prompt_tokens", "prompt_logprobs"),
        }
    ),
    # /v1/messages and /v1/embeddings have the field in the latest releases only; earlier ones ignore it.
    salted_paths=frozenset({COMPLETIONS, CHATS, RESPONSES}),
)
_SGLANG = EngineFields(
    internal=frozenset(
        {
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
            *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "routing_key", "conversation_id"),
            *("extra_key", "cache_salt", "kv_hints", "lora_path", "lora_id", "priority", "rid", "request_id"),
            *("session_id", "session_params", "custom_logit_processor", "custom_params", "custom_labels", "watermark"),
            *("input_embeds", "input_ids", "mm_hashes", "mm_content_hashes", "mm_processor_kwargs", "images_config"),
            *("video_config", "positional_embed_overrides", "embed_overrides", "embed_override_token_id"),
            *("encoder_urls", "http_worker_ipc", "need_wait_for_mm_inputs", "num_items_assigned"),
            *("token_indices_to_pool", "multi_item_delimiter_indices", "external_trace_header", "received_time"),
            *("no_logs", "log_metrics", "background", "previous_response_id", "chat_template", "sampling_params"),
            *("return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_indexer_topk"),
            *("return_bytes", "return_sampling_mask", "return_pooled_hidden_states", "beam_width"),
        }
    ),
    set_by_worker=frozenset({"max_new_tokens", "n", "beam_width", "stream_interval"}),
    salted_paths=frozenset({COMPLETIONS, CHATS, RESPONSES}),
)
_TENSORRT_LLM = EngineFields(
    internal=frozenset(
        {
            *("disaggregated_params", "conversation_params", "cache_salt", "priority", "lora_request"),
            *("agent_hierarchy", "mm_processor_kwargs", "media_io_kwargs", "chat_template", "prompt_token_ids"),
            *("prompt_token_ids_b64", "injected_chat_template_kwargs", "return_context_logits", "previous_response_id"),
            *("background", "prompt_ignore_length", "logits_processor", "scheduling_params"),
        }
    ),
    set_by_worker=frozenset(),
    salted_paths=frozenset({CHATS}),
)
ENGINES: Final[Mapping[EngineName, EngineFields]] = {"vllm": _VLLM, "sglang": _SGLANG, "tensorrt-llm": _TENSORRT_LLM}

INTERNAL: Final = frozenset({"extra_body", "nvext", *(name for engine in ENGINES.values() for name in engine.internal)})
"""Fields with an internal meaning for an engine, or for a proxy before it. No option of an operator permits them."""

ROUTED: Final = frozenset({"cache_salt", "priority"})
"""Internal fields a client may send to kvrouter, which checks them. Engines get a keyed salt, no priority."""

_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "top_p_min", "seed", "stop", "stop_token_ids", "stop_regex"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty", "logit_bias", "bad_words"),
        *("allowed_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output", "no_stop_trim"),
        *("skip_special_tokens", "spaces_between_special_tokens", "early_stopping", "thinking_token_budget"),
        *("repetition_detection", "response_format", "structured_outputs", "guided_json", "guided_regex"),
        *("guided_choice", "guided_grammar", "guided_whitespace_pattern", "json_schema", "regex", "ebnf"),
        "structural_tag",
    }
)
_GENERATION = _SAMPLING | {
    *("model", "stream", "stream_options", "max_tokens", "n", "best_of", "logprobs"),
    *("prompt_logprobs", "logprob_token_ids", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "return_token_ids"),
    *("return_tokens_as_token_ids", "return_token_offsets", "truncate_prompt_tokens", "truncation_side"),
    *("add_special_tokens", "stream_interval", *ROUTED),
}
HARMLESS: Final[Mapping[str, frozenset[str]]] = {
    COMPLETIONS: _GENERATION | {"prompt", "echo", "suffix"},
    CHATS: _GENERATION
    | {
        *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "reasoning", "thinking", "include_reasoning", "separate_reasoning", "stream_reasoning"),
        *("add_generation_prompt", "continue_final_message", "documents", "chat_template_kwargs", "modalities"),
        *("prediction", "verbosity", "echo", "return_prompt_token_ids"),
    },
    RESPONSES: _GENERATION
    | {
        *("input", "instructions", "max_output_tokens", "max_tool_calls", "include", "reasoning", "include_reasoning"),
        *("text", "truncation", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        "verbosity",
    },
    MESSAGES: frozenset(
        {
            *("model", "messages", "max_tokens", "metadata", "stop_sequences", "stream", "system", "temperature"),
            *("thinking", "tool_choice", "tools", "top_k", "top_p", "output_config", "chat_template_kwargs"),
            *("service_tier", "betas", "cache_control", "context_management", "diagnostics", "inference_geo", "speed"),
            *("user_profile_id", "workspace_id", *ROUTED),
        }
    ),
    EMBEDDINGS: frozenset(
        {
            *("model", "input", "messages", "encoding_format", "embed_dtype", "endianness", "dimensions", "user"),
            *("truncate_prompt_tokens", "truncation_side", "padding", "add_special_tokens", "use_activation"),
            *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", *ROUTED),
        }
    ),
}
"""Fields of a body for prompt, sampling and the form of the response, by path. No engine gives one of them
another meaning."""
HARMLESS_OPTIONS: Final = _SAMPLING
"""Sampling options of ``SamplingOptions.engine_options_json``."""
HARMLESS_HEADERS: Final = frozenset({"accept", "accept-encoding", "accept-language", "content-type", "user-agent"})
"""Headers of a client passed on to engines. They read others as ids, ranks, priorities and transfers."""
INTERNAL_PART_FIELDS: Final = frozenset(
    {
        *("uuid", "content_hash", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "mm_hashes"),
        *("processor_output", "precomputed_embedding", "image_pil"),
    }
)
"""Fields and types of parts of a message with references to cached or computed content."""
INTERNAL_TEMPLATE_FIELDS: Final = frozenset(
    {
        *("chat_template", "tokenize", "return_dict", "return_tensors", "tokenizer_kwargs", "conversation", "messages"),
        *("padding", "truncation", "max_length", "processor_kwargs"),
    }
)
"""Keys of ``chat_template_kwargs`` for the tokenizer's call instead of the template."""
TRANSFER_RESULTS: Final = (
    *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "cache_salt", "extra_key"),
)
"""Fields an engine may return, and a client must not see."""
NEVER_QUOTED: Final = tuple(
    name.encode()
    for name in (*TRANSFER_RESULTS, "remote_host", "remote_block_ids", "remote_engine_id", "ctx_request_id")
)
"""Names of fields that a response must not quote to a client."""
_QUOTED = re.compile(b"|".join(NEVER_QUOTED))


_WITHHELD = "the engine's message is in its own log, since it quotes fields that the client did not send"


def has_salt(engine: str, path: str) -> bool:
    """Returns whether an engine separates caches by salt at a path of its API; False for an unknown engine."""
    return any(engine == name and path in ENGINES[name].salted_paths for name in get_args(EngineName))


def quotes_internal(text: bytes) -> bool:
    """Returns whether a response has the name of a field a client must not see."""
    return _QUOTED.search(text) is not None


def shown_failure(message: str) -> str:
    """Returns an engine's message for a client: another one if it quotes fields the client must not see."""
    return _WITHHELD if quotes_internal(message.encode("utf-8", "surrogatepass")) else message


_PREFIX = "tenant:"


def engine_salt(scope: BlockScope) -> str:
    """Returns the salt for an engine: the scope's, with its tenant before it if there is one."""
    if not scope.tenant and not scope.cache_salt.startswith(_PREFIX):
        return scope.cache_salt
    return f"{_PREFIX}{quote(scope.tenant, safe='')}:{scope.cache_salt}"


def split_salt(salt: str) -> tuple[str, str]:
    """Returns the tenant and the salt an engine's salt stands for."""
    tenant, colon, rest = salt.removeprefix(_PREFIX).partition(":")
    return (unquote(tenant), rest) if colon and salt.startswith(_PREFIX) else ("", salt)


VLLM_TRANSFER: Final = "vllm-json"
"""vLLM's kv_transfer_params: a JSON object from the prefill engine's response, for the decode engine's request."""
SGLANG_TRANSFER: Final = "sglang-json"
"""A JSON object with bootstrap_host, bootstrap_port and bootstrap_room, for both engines at once."""
START_OF_VLLM_TRANSFER: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The kv_transfer_params of the prefill engine's request."""
