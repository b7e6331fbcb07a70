"""Prompts between requests and packed buffers."""

from __future__ import annotations

import struct

from kvrouter.frontend.packed_prompt import encode_with_prompt, take_prompt
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

TOKENS = [0, 300, 2**32 - 1]
PACKED = struct.pack("<3I", *TOKENS)


def test_a_prompt_is_taken_out_of_its_request() -> None:
    request = FrontendServiceGenerateRequest(request_id="r", token_ids=TokenIds(ids=TOKENS))
    assert take_prompt(request) == PACKED
    assert request == FrontendServiceGenerateRequest(request_id="r")


def test_a_worker_reads_the_tokens_of_a_packed_prompt() -> None:
    encoded = encode_with_prompt(WorkerServiceGenerateRequest(request_id="r", attempt=2), PACKED)
    expected = WorkerServiceGenerateRequest(request_id="r", token_ids=TOKENS, attempt=2)
    assert WorkerServiceGenerateRequest.FromString(encoded) == expected
