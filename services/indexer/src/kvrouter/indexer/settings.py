"""Options of the Indexer."""

from __future__ import annotations

from kvrouter.runtime.config.settings import ServiceSettings
from pydantic import AliasChoices, Field


class IndexerSettings(ServiceSettings):
    """Options of ``kvrouter-indexer``; each is a flag, an environment variable and a key of the file."""

    worker_grace_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Time for which the blocks of a worker are kept after its registration is gone, in seconds.",
    )
    max_prompt_tokens: int = Field(
        default=1 << 20, ge=1, description="Largest prompt of a query, in tokens, whatever the model allows."
    )
    max_index_blocks: int = Field(
        default=0, ge=0, description="Most blocks in the index of a component, counted over all ranks; 0 is unlimited."
    )
    max_index_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Most memory for the indexes of all components of the process together, in bytes; 0 is unlimited. "
        "Default: half of the memory available to the process, which is the lowest limit of its control groups or the "
        "memory of the machine.",
    )
    compare_seconds: float = Field(
        default=10.0,
        ge=0,
        description="Longest wait of readiness for comparisons with workers once the events are read, in seconds.",
    )
    resync_fetches: int = Field(
        default=8, ge=1, le=256, description="Most concurrent fetches from workers, over all components."
    )
    snapshot_threshold: int = Field(
        default=1_000_000,
        ge=1,
        description="Number of messages since the last snapshot after which another one is due.",
        validation_alias=AliasChoices("snapshot_threshold", "router_snapshot_threshold"),
    )
    snapshot_check_seconds: float = Field(
        default=5.0, gt=0, description="Interval between checks whether a snapshot is due, in seconds."
    )
    snapshot_lock_seconds: int = Field(
        default=10, ge=2, description="Time after which the snapshot lock of a replica that died expires, in seconds."
    )
    reset_states: bool = Field(
        default=False,
        description="Delete the streams' messages and all snapshots at start, and refill the index from live workers.",
        validation_alias=AliasChoices("reset_states", "router_reset_states"),
    )
    reset_states_even_if_others_live: bool = Field(
        default=False, description="Let --reset-states continue although another replica is live."
    )
