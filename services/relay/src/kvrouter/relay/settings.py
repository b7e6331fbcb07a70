"""Options of the relay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kvrouter.engines.events.vllm_sglang_events import Dialect
from kvrouter.runtime.config.fields import LoraIds, RoleOption, TransportOption, check_socket_endpoint, unless_empty
from kvrouter.runtime.config.settings import Name, ServiceSettings
from pydantic import Field

_Endpoint = Annotated[str, unless_empty(check_socket_endpoint)]


class RelaySettings(ServiceSettings):
    """Options of ``kvrouter relay``; each is a flag, an environment variable and a key of the file."""

    kv_events: _Endpoint
    """Endpoint of rank 0's PUB socket, tcp://host:port or ipc://path. Each further rank has the next port. With * as
    the host the relay listens, for engines that connect."""
    kv_replay: _Endpoint = ""
    """Endpoint of rank 0's replay socket, tcp://host:port; empty if the engine has none."""
    kv_topic: str = ""
    """Topic of the events; others are ignored. Empty for any topic."""
    engine: Dialect = "vllm"
    """Whose event format the engine has."""
    component: Name = "workers"
    """Name of the component that the engine joins."""
    model: str = Field(min_length=1)
    """Name of the model that clients send."""
    block_size: int = Field(ge=1, le=1 << 20)
    """Tokens per KV block of the engine."""
    worker_id: int | None = Field(default=None, ge=0, lt=1 << 64)
    """Id of the worker in its component; none draws one at random."""
    dp_size: int = Field(default=1, ge=1, le=1024)
    """Number of data-parallel ranks of the engine."""
    dp_start_rank: int = Field(default=0, ge=0, le=65_535)
    """First data-parallel rank, of an engine that serves only some of them."""
    total_blocks: int | None = Field(default=None, ge=1, lt=1 << 63)
    """KV blocks of each rank in device memory; none if unknown."""
    copy_counting: Literal["counted", "set"] = "counted"
    """Whether the engine reports each physical copy of a block, or a set of blocks."""
    full_reports: bool = False
    """Whether requests make the engine report their hits too (kv_cache_report_mode: full)."""
    offloaded_blocks: int = Field(default=1, ge=1, le=1 << 20)
    """Blocks in a chunk that the engine offloads and reports by its last hash alone."""
    lora_ids: LoraIds = Field(default_factory=dict)
    """Names of LoRA adapters by number, for engines that report numbers only."""
    max_model_len: int = Field(default=0, ge=0, lt=1 << 32)
    """Most prompt and output tokens together; 0 for no limit."""
    role: RoleOption = "both"
    """Role of the engine."""
    transport: TransportOption = "default"
    """Transport of the events; default is the component's."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for routing constraints."""
    state: Path | None = None
    """Directory with snapshots, from which a restarted relay resumes; needs a worker id. None keeps nothing."""
    state_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Least interval of the snapshots, in seconds."""
    replay_seconds: float = Field(default=10.0, gt=0)
    """Longest time between two messages of a replay, in seconds."""
    queued_messages: int = Field(default=100_000, ge=1)
    """Messages that wait in each subscription; further ones are replayed."""
    engine_grace_seconds: float = Field(default=5.0, ge=0)
    """Time without a connection to the engine before routers avoid it, in seconds."""
