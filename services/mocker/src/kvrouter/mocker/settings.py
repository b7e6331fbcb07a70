"""Options of the mocker."""

from __future__ import annotations

from typing import Literal

from kvrouter.runtime.config.settings import Name, ServiceSettings
from pydantic import Field, model_validator


class MockerSettings(ServiceSettings):
    """Options of ``kvrouter-mocker``; each is a flag, an environment variable and a key of the file."""

    component: Name = Field(default="workers", description="Component that the worker joins.")
    model: str = Field(default="mock-model", min_length=1, description="Model that it claims to serve.")
    worker_id: int | None = Field(
        default=None, ge=0, lt=1 << 64, description="Id in the component; drawn at random where none is given."
    )
    dp_size: int = Field(default=1, ge=1, le=256, description="Data parallel ranks, each an engine of its own.")
    num_blocks: int = Field(default=16_384, ge=1, description="KV blocks of each rank.")
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens per KV block.")
    max_batched_tokens: int = Field(default=8192, ge=1, description="Tokens that a step computes at most.")
    max_sequences: int = Field(default=256, ge=1, description="Requests that run at once.")
    max_waiting: int = Field(default=65_536, ge=1, description="Requests that may wait; one more is refused.")
    max_model_len: int = Field(
        default=0, ge=0, description="Longest sequence, prompt and output, in tokens; 0 for what the cache holds."
    )
    speed: float = Field(default=1.0, gt=0, description="Speed against the time model; 2 halves every step.")
    clock_factor: float = Field(
        default=1.0, gt=0, description="Engine seconds that pass in a second of wall time; the same for all workers."
    )
    stream_interval: int = Field(
        default=1, ge=1, description="Tokens in a piece of an answer, after the first token, which comes at once."
    )
    role: Literal["both", "prefill", "decode"] = Field(default="both", description="What the worker does.")
    transport: Literal["default", "durable", "core-nats"] = Field(
        default="default", description="How events travel; default takes the component's."
    )
    enable_local_indexer: bool = Field(
        default=False,
        description="The same as --transport core-nats: events travel over NATS Core, and routers fetch the state.",
    )
    registration: bool = Field(
        default=True,
        description="Whether it registers in etcd and publishes over NATS; otherwise it only serves, for routers that"
        " list it (--static-workers).",
    )
    events: bool = Field(default=True, description="Whether cache events are published.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels for routing constraints.")
    heartbeat_seconds: float = Field(
        default=5.0, gt=0, description="Seconds without events after which cursor and digest are told all the same."
    )
    load_report_seconds: float = Field(default=1.0, ge=0, description="Seconds between load reports; 0 for none.")

    @model_validator(mode="after")
    def _one_transport(self) -> MockerSettings:
        if self.enable_local_indexer and self.transport == "durable":
            raise ValueError("--enable-local-indexer means --transport core-nats: leave --transport durable out")
        return self
