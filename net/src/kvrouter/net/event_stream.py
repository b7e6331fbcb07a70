"""The JetStream stream that keeps a component's events: the one definition that publishers and Indexers share."""

from __future__ import annotations

import structlog
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServerError

log = structlog.get_logger(__name__)

MAX_AGE_SECONDS = 3600.0
"""Age at which events go: an Indexer that was away for longer restores from a snapshot or from the workers."""

MAX_BYTES = 1 << 30
"""Size at which the oldest events go. A server reserves this much of its storage when the stream is created."""

DUPLICATE_WINDOW_SECONDS = 120.0
"""Time for which a batch that is sent again is recognised by its Nats-Msg-Id."""

_LEAST_BYTES = 16 << 20
_NO_SUBJECT = "kvrouter.v1.no-such-subject"
_ANOTHER_CONFIG = 10058
_STORAGE_SHORT = 10047


def stream_config(component: ComponentName, *, max_bytes: int = MAX_BYTES) -> StreamConfig:
    """Configuration of a component's stream: one subject per rank, the oldest messages go first."""
    return StreamConfig(
        name=component.stream,
        subjects=[component.events_wildcard],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=MAX_AGE_SECONDS,
        max_bytes=max_bytes,
        duplicate_window=DUPLICATE_WINDOW_SECONDS,
        allow_direct=True,
    )


async def ensure_stream(js: JetStreamContext, component: ComponentName, *, max_bytes: int = MAX_BYTES) -> StreamInfo:
    """The component's stream, created if it is missing; one that exists keeps its limits, which are the operator's.

    Any number of processes may call this at the same time. Where the server has not ``max_bytes`` of storage left to
    reserve, the stream gets half, or half of that, down to 16 MiB, with a warning.

    Raises:
        nats.js.errors.APIError: the server refuses; code 10047 where even the least storage is not left.
        nats.errors.Error: NATS, or JetStream in it, is away (TimeoutError, NoRespondersError and the like).
    """
    size = max_bytes
    while True:
        try:
            return await js.stream_info(component.stream)
        except NotFoundError:
            pass
        try:
            info = await js.add_stream(stream_config(component, max_bytes=size))
        except APIError as error:
            # Somebody created it meanwhile, with limits of their own: the next turn finds it.
            if error.err_code == _ANOTHER_CONFIG:
                continue
            if error.err_code != _STORAGE_SHORT or size <= _LEAST_BYTES:
                raise
            size = max(size // 2, _LEAST_BYTES)
            continue
        if size < max_bytes:
            log.warning("stream.reduced", stream=component.stream, max_bytes=size, requested=max_bytes)
        log.info("stream.created", stream=component.stream, max_bytes=size)
        return info


async def write_error(js: JetStreamContext, stream: str) -> str:
    """Returns the error for which a stream takes no messages, such as a full disk; empty where there is none.

    From version 2.14 on (nats-server pull request 7788), the server stops a stream at its first failed write. It starts
    only when the server is restarted or the stream is made anew, even if the disk has space again. Publishing gets no
    answer meanwhile, and reading works. A request that would change the stream is answered with the error, so this
    purges a subject that no stream has. A stream that is missing has no error.

    Raises:
        nats.errors.Error: NATS, or JetStream in it, is away.
    """
    try:
        await js.purge_stream(stream, subject=_NO_SUBJECT)
    except NotFoundError:
        return ""
    except ServerError as error:
        return error.description or repr(error)
    return ""
