"""Options of the Indexer."""

from __future__ import annotations

from kvrouter.runtime.config.settings import ServiceSettings
from pydantic import AliasChoices, Field


class IndexerSettings(ServiceSettings):
    """Options of ``kvrouter-indexer``; each is a flag, an environment variable and a key of the file."""

    worker_grace_seconds: float = Field(
        default=60.0,
        ge=0,
        description="How long the blocks of a worker whose registration is gone are kept, seconds.",
    )
    max_prompt_tokens: int = Field(
        default=1 << 20, ge=1, description="Most tokens in a prompt that is asked about, whatever the model allows."
    )
    max_index_blocks: int = Field(
        default=0, ge=0, description="Most blocks in the index of one component, over all ranks; 0 is no bound."
    )
    max_index_bytes: int = Field(
        default=0, ge=0, description="Most memory for the index of one component, bytes; 0 is no bound."
    )
    compare_seconds: float = Field(
        default=10.0,
        ge=0,
        description="How long readiness waits for workers to be compared with, once the transport is read, seconds.",
    )
    resync_fetches: int = Field(
        default=8, ge=1, le=256, description="Fetches of state from workers at one time, over all components."
    )
    snapshot_threshold: int = Field(
        default=1_000_000,
        ge=1,
        description="Messages after the newest snapshot that make another one due.",
        validation_alias=AliasChoices("snapshot_threshold", "router_snapshot_threshold"),
    )
    snapshot_check_seconds: float = Field(
        default=5.0, gt=0, description="Time between looks at whether a snapshot is due, seconds."
    )
    snapshot_lock_seconds: int = Field(
        default=10, ge=2, description="Life of the lock of a replica that died while it took a snapshot, seconds."
    )
    reset_states: bool = Field(
        default=False,
        description="Drop the streams' messages and all snapshots at the start; the index refills from live workers.",
        validation_alias=AliasChoices("reset_states", "router_reset_states"),
    )
    reset_states_even_if_others_live: bool = Field(
        default=False, description="With --reset-states: go on although another replica is live, which it refuses."
    )
