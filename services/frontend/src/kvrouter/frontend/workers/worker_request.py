"""A request as one worker gets it. Only a worker's Generate takes a message: an engine gets the client's body."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, Sampling, StopRules
from kvrouter.frontend.packed_prompt import encode_with_prompt
from kvrouter.net import trace_context
from kvrouter.v1.common_pb2 import BlockScope, KvSource, Stage
from kvrouter.v1.worker_pb2 import TransferParams, WorkerServiceGenerateRequest

# Reading it from the enum takes over a microsecond.
_WHOLE = Stage.STAGE_WHOLE


class WorkerRequest(msgspec.Struct, kw_only=True, eq=False):
    """A request without its prompt: the fields of ``WorkerServiceGenerateRequest``."""

    request_id: str
    stop: StopRules
    stage: Stage = _WHOLE
    attempt: int = 0
    dp_rank: int = 0
    priority: int = 0
    conversation_id: str = ""
    sampling: Sampling = DEFAULT_SAMPLING
    scope: BlockScope | None = None
    content: Sequence[tuple[int, int]] = ()
    """Block index and hash of its multimodal content."""
    transfer_params: TransferParams | None = None
    """Where the worker fetches the prompt's KV cache; None if it computes the prompt."""
    kv_source: KvSource | None = None
    """Another rank that holds more of the prompt; None if none does."""

    def encode(self, prompt: bytes) -> bytes:
        """Returns the encoded message, with a prompt that is a packed buffer."""
        message = WorkerServiceGenerateRequest()
        message.request_id, message.stage = self.request_id, self.stage
        # To set a field costs more than to leave it at its default.
        if self.attempt:
            message.attempt = self.attempt
        if self.dp_rank:
            message.dp_rank = self.dp_rank
        if self.priority:
            message.priority = self.priority
        if self.conversation_id:
            message.conversation_id = self.conversation_id
        if any(companions := trace_context.companions()):
            message.tracestate, message.baggage = companions
        self.stop.write(message.stop_conditions)
        if self.sampling != DEFAULT_SAMPLING:
            self.sampling.write(message.sampling_options)
        if self.scope is not None:
            message.scope.CopyFrom(self.scope)
        if self.transfer_params is not None:
            message.transfer_params.CopyFrom(self.transfer_params)
        if self.kv_source is not None:
            message.kv_source.CopyFrom(self.kv_source)
        for block, content_hash in self.content:
            message.multimodal_hashes.add(block_index=block, hash=content_hash)
        return encode_with_prompt(message, prompt)
