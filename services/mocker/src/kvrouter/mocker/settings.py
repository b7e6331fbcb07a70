"""Options of the mocker."""

from __future__ import annotations

from typing import Literal

from kvrouter.mocker.poison import PoisonEffect
from kvrouter.mocker.serving.settings import EngineServerSettings
from kvrouter.runtime.config.fields import RoleOption, TransportOption
from kvrouter.runtime.config.settings import Name
from pydantic import Field, model_validator


class MockerSettings(EngineServerSettings):
    """Options of ``kvrouter-mocker``; each is a flag, an environment variable and a key of the file."""

    component: Name = "workers"
    """Name of the component that the worker joins."""
    model: str = Field(default="mock-model", min_length=1)
    """Name of the model that the worker registers."""
    worker_id: int | None = Field(default=None, ge=0, lt=1 << 64)
    """Id of the worker in its component; none draws one at random."""
    workers_per_process: int = Field(default=1, ge=1, le=4096)
    """Number of workers, each with an address of its own, that share a connection to NATS and a lease; their ids follow
    --worker-id."""
    dp_size: int = Field(default=1, ge=1, le=256)
    """Number of data-parallel ranks, each a simulated engine of its own."""
    num_blocks: int = Field(default=16_384, ge=1)
    """Number of KV blocks of each rank."""
    host_blocks: int = Field(default=0, ge=0)
    """Number of KV blocks of each rank in host memory; 0 for none."""
    host_gb_per_second: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Bandwidth at which a rank loads blocks from host memory, in 10^9 bytes per second."""
    host_latency_ms: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Time of a load from host memory besides that of its bytes, in milliseconds."""
    shared_blocks: int = Field(default=0, ge=0)
    """Number of KV blocks that each rank stores in the storage that the ranks of the process share; 0 for none."""
    shared_gb_per_second: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Bandwidth at which a rank loads blocks from shared storage, in 10^9 bytes per second."""
    shared_latency_ms: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Time of a load from shared storage besides that of its bytes, in milliseconds."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens per KV block."""
    max_batched_tokens: int = Field(default=8192, ge=1)
    """Most tokens that a step computes."""
    poison_token: int | None = Field(default=None, ge=0, lt=1 << 32)
    """Token id that harms the process when a prompt has it, to test what a router does; none for none."""
    poison_effect: PoisonEffect = "die"
    """What the poison token does: the process dies at once, dies after the first output, or hangs."""
    max_sequences: int = Field(default=256, ge=1)
    """Most requests that run at the same time."""
    max_waiting: int = Field(default=65_536, ge=1)
    """Most requests that wait in the engine's queue; one more is refused."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest sequence, prompt and output, in tokens; 0 is what the cache holds."""
    tokenizer: str = ""
    """Directory of a tokenizer to publish for the model, so that Frontends take text."""
    vocabulary_size: int = Field(default=32_000, ge=1, le=1 << 32)
    """Number of token ids from which the output is drawn, from 0 on."""
    mean_output_tokens: float = Field(default=128.0, ge=0)
    """Mean length of outputs that end by themselves, distributed geometrically, unless the request has ignore_eos; 0
    ends outputs at their maximum only."""
    speed: float = Field(default=1.0, gt=0)
    """Speed relative to the time model; 2 halves the time of every step."""
    clock_factor: float = Field(default=1.0, gt=0)
    """Engine seconds that pass in one second of wall time; the same for all workers."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens in each piece of a response, except for the first token, which is sent at once."""
    role: RoleOption = "both"
    """Role of the worker."""
    handover: Literal["sequential", "concurrent"] = "sequential"
    """How a worker with the role prefill hands prompts over: decode workers fetch them afterwards, or meet it while
    it computes them."""
    kv_bytes_per_token: int = Field(default=131_072, ge=0)
    """KV cache of a token that a decode worker receives, or a rank loads from a lower tier, in bytes."""
    kv_transfer_gb_per_second: float = Field(default=25.0, gt=0)
    """Bandwidth at which a decode worker receives blocks, in 10^9 bytes per second."""
    kv_transfer_latency_ms: float = Field(default=5.0, ge=0)
    """Time of a transfer besides that of its bytes, in milliseconds."""
    kv_lease_seconds: float = Field(default=480.0, gt=0)
    """Time for which a worker with the role prefill keeps blocks for a decode worker, in seconds."""
    transport: TransportOption = "default"
    """Transport of the events; default is the component's."""
    enable_local_indexer: bool = False
    """The same as --transport core-nats: events travel over NATS Core, and routers fetch the state."""
    registration: bool = True
    """Whether the worker registers in etcd and publishes over NATS; if not, routers must list it."""
    events: bool = True
    """Whether cache events are published."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for routing constraints."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Interval of heartbeats while there are no events, in seconds."""
    load_report_seconds: float = Field(default=1.0, ge=0)
    """Interval at which the load is read, in seconds. A change is reported at once, an unchanged load within 7 s. 0
    reports none."""

    @model_validator(mode="after")
    def _one_transport(self) -> MockerSettings:
        if self.enable_local_indexer and self.transport == "durable":
            raise ValueError("--enable-local-indexer means --transport core-nats: leave --transport durable out")
        return self

    @model_validator(mode="after")
    def _own_ports(self) -> MockerSettings:
        is_worker = self.registration and not (self.openai or self.sglang)
        if self.workers_per_process > 1 and not (is_worker and self.bind.endswith(":0")):
            raise ValueError("--workers-per-process needs registered workers, and port 0 in --bind: each has its own")
        return self
