"""Formats of the parameters with which engines hand KV blocks over, as vLLM and SGLang define them."""

from __future__ import annotations

from typing import Any, Final

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
