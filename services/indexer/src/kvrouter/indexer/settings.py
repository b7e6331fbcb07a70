"""Options of the Indexer."""

from __future__ import annotations

from kvrouter.runtime.config.settings import ServiceSettings
from pydantic import AliasChoices, Field


class IndexerSettings(ServiceSettings):
    """Options of ``kvrouter-indexer``. Each is a flag, an environment variable and a key of the configuration file."""

    worker_grace_seconds: float = Field(default=60.0, ge=0)
    """Time for which a worker's blocks are kept after its registration is gone, in seconds."""
    max_prompt_tokens: int = Field(default=1 << 20, ge=1)
    """Maximum length of the prompt in a query, in tokens, for every model."""
    max_index_blocks: int = Field(default=0, ge=0)
    """Maximum number of blocks in a component's index, summed over ranks; 0 is unlimited."""
    max_index_bytes: int | None = Field(default=None, ge=0)
    """Maximum memory for the indexes of all components in the process, in bytes; 0 is unlimited. The default is half
    of the available memory: the lowest limit of the process's control groups, or the machine's memory."""
    compare_seconds: float = Field(default=10.0, ge=0)
    """Maximum time that readiness waits for comparisons with workers after events are read, in seconds."""
    resync_fetches: int = Field(default=8, ge=1, le=256)
    """Maximum number of concurrent fetches from workers, over all components."""
    snapshot_threshold: int = Field(
        default=1_000_000, ge=1, validation_alias=AliasChoices("snapshot_threshold", "router_snapshot_threshold")
    )
    """Number of messages after the last snapshot that makes the next one due."""
    snapshot_check_seconds: float = Field(default=5.0, gt=0)
    """Interval between checks of whether a snapshot is due, in seconds."""
    snapshot_lock_seconds: int = Field(default=10, ge=2)
    """Time after which the snapshot lock of a crashed replica expires, in seconds."""
    reset_states: bool = Field(default=False, validation_alias=AliasChoices("reset_states", "router_reset_states"))
    """Delete all stream messages and snapshots at start, and rebuild the index from live workers."""
    reset_states_even_if_others_live: bool = False
    """Allow the reset of states at start while other replicas are live."""
