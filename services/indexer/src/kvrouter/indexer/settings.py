"""Options of the Indexer, and the default memory bound of the indexes of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvrouter.runtime.config.settings import OptionalAddress, ServiceSettings
from pydantic import AliasChoices, Field

INDEX_SHARE = 0.5
"""Share of the available memory for the indexes. Dumps, snapshots, pending events and other services need the rest."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def default_max_index_bytes() -> int:
    """Returns half of the memory available to the process, in bytes; 0 (no bound) if it is unknown."""
    available = [*cgroup_limits(), *_physical_bytes()]
    return int(min(available) * INDEX_SHARE) if available else 0


def cgroup_limits(own: Path = _OWN_CGROUPS, mount: Path = _CGROUPS) -> Iterator[int]:
    """Yields the memory limits of the process's control group and its ancestors, in bytes.

    Args:
        own: File with the control groups of the process.
        mount: Mount point of control groups, version 1 or 2.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(name.lstrip("/"))
        for group in (path, *path.parents):
            try:
                limit = (folder / group / file).read_text().strip()
            except OSError:
                continue
            if limit.isdigit():  # "max" means no limit in version 2
                yield int(limit)


def _physical_bytes() -> Iterator[int]:
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return


class IndexerSettings(ServiceSettings):
    """Options of ``kvrouter-indexer``. Each is a flag, an environment variable and a key of the configuration file."""

    query_bind: OptionalAddress = ""
    """Address that serves the index to other routers over HTTP, as Mooncake Conductor and Dynamo's indexer do,
    host:port; port 0 takes a free one, empty serves none."""
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
