"""A system whose only engine says what a test tells it to say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest
from tokenizers import Tokenizer

from ....waiting import until
from ..gateway import MODEL, System, running_system


class SpeakingEngine:
    """An engine that constrains outputs, and says what it is told to say."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.says = ""
        self.schema: Any = None
        self._tokenizer = tokenizer

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        schema = request.sampling_options.structured_output.json_schema
        self.schema = json.loads(schema) if schema else None
        *tokens, last = self._tokenizer.encode(self.says).ids
        for token in tokens:
            yield GenerateOutput(token_ids=[token])
        yield GenerateOutput(token_ids=[last], finish_reason=FinishReason.FINISH_REASON_STOP)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport(total_blocks=512)}


@asynccontextmanager
async def speaking_system(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[System, SpeakingEngine]]:
    """Runs a system with a small tokenizer, tool calls as Hermes writes them, and reasoning as Qwen 3 does."""
    write_small_tokenizer(tmp_path)
    engine = SpeakingEngine(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    (tmp_path / "output_format.json").write_text('{"reasoning_parser": "qwen3"}')
    settings: dict[str, Any] = {"tokenizers": {MODEL: str(tmp_path)}, "tool_call_parsers": {MODEL: "hermes"}}
    config = WorkerConfig(
        component=ComponentName(namespace, "workers"),
        model=MODEL,
        block_size=16,
        worker_id=2,
        ranks={0: 512},
        etcd=etcd_endpoint,
        nats=nats_url,
        max_model_len=8192,
        structured_output=True,
    )
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **settings, **options) as system,
        AsyncExitStack() as stack,
    ):
        worker = await stack.enter_async_context(sdk.running(config, engine))
        await worker.registered()
        await system.until_candidate(2)
        await until(lambda: system.frontend.models.has_text(MODEL))
        yield system, engine
