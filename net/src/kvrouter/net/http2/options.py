"""gRPC settings on which clients and servers must agree."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a received message: sixteen times a prompt of a million tokens."""

MAX_CALLS = 16_384
"""Maximum number of concurrent calls of a server, sessions included; further calls get RESOURCE_EXHAUSTED."""
CONNECTION_CALLS = 1_024
"""Maximum number of concurrent calls of one connection."""

KEEPALIVE_MS = 20_000
"""Silence after which a peer is pinged."""
KEEPALIVE_TIMEOUT_MS = 10_000
"""Time for the answer of a pinged peer."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Senders have no limit of their own, because only the receiver's refusal is a typed error.
    ("grpc.max_send_message_length", -1),
    # Detects within 30 s a peer that vanished without closing its connection (a lost host, a partition).
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A ping that measures the bandwidth delays those above while it is unanswered, for 60 s by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Idle sessions send nothing, but the death of their peer must be detected.
    ("grpc.keepalive_permit_without_calls", 1),
    # Reconnects to a restarted peer within 2 s; gRPC's default back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Dials a peer at once when it returns at its address. By default all channels of a process share their connections,
    # and a new channel waits for the back-off of an earlier one.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are addressed directly; a proxy in the environment is for external traffic.
    ("grpc.enable_http_proxy", 0),
)
