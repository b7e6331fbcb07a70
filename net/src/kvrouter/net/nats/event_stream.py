"""The JetStream stream of a component's events, as publishers and Indexers both create it."""

from __future__ import annotations

from kvrouter.net.logs import get_logger
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServerError

log = get_logger(__name__)

MAX_AGE_SECONDS = 3600.0
"""Age at which events are discarded. An Indexer away for longer restores a snapshot or resyncs."""

MAX_BYTES = 1 << 30
"""Size at which the oldest events are discarded. The server reserves this much storage when it creates the stream."""

DUPLICATE_WINDOW_SECONDS = 120.0
"""Time within which the server drops a repeated batch by its Nats-Msg-Id."""

_LEAST_BYTES = 16 << 20
_NO_SUBJECT = "kvrouter.v1.no-such-subject"
_ANOTHER_CONFIG = 10058
_STORAGE_SHORT = 10047


def stream_config(component: ComponentName, *, max_bytes: int = MAX_BYTES) -> StreamConfig:
    """Returns the configuration of a component's stream: one subject per rank, oldest messages discarded first."""
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
    """Returns the component's stream and creates it if it is missing. An existing stream keeps its limits.

    Any number of processes may call this at the same time. If the server cannot reserve ``max_bytes`` of storage, the
    stream gets half, and so on down to 16 MiB, with a warning.

    Raises:
        nats.js.errors.APIError: the server refuses; code 10047 if it cannot reserve even 16 MiB.
        nats.errors.Error: NATS or JetStream is away (TimeoutError, NoRespondersError and the like).
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
            # Another process created the stream meanwhile with other limits: the next iteration finds it.
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
    """Returns the error because of which a stream takes no messages, such as a full disk; empty if there is none.

    From version 2.14 on (nats-server pull request 7788), the server stops a stream at its first failed write. The
    stream stays stopped until the server is restarted or the stream is recreated, even if the disk has space again.
    Meanwhile publishing gets no reply, but reading works. A request to change the stream is answered with the
    error, so this function purges a subject outside of all streams. A missing stream has no error.

    Raises:
        nats.errors.Error: NATS or JetStream is away.
    """
    try:
        await js.purge_stream(stream, subject=_NO_SUBJECT)
    except NotFoundError:
        return ""
    except ServerError as error:
        return error.description or repr(error)
    return ""
