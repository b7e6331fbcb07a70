"""gRPC settings on which clients and servers must agree."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a received message: sixteen times a prompt of a million tokens."""

MAX_CALLS = 16_384
"""Maximum number of concurrent calls of a server, sessions included; further calls get RESOURCE_EXHAUSTED."""

MAX_PENDING_CALLS = 4_096
"""Maximum number of calls in wait for the event loop of a server."""
CONNECTION_CALLS = 1_024
"""Maximum number of concurrent calls of one connection."""

KEEPALIVE_MS = 20_000
"""Silence after which a peer is pinged."""
KEEPALIVE_TIMEOUT_MS = 10_000
"""Time for the answer of a pinged peer."""

_BOTH = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Senders have no limit of their own, because only the receiver's refusal is a typed error.
    ("grpc.max_send_message_length", -1),
    # Detects within 30 s a peer that vanished without closing its connection (a lost host, a partition).
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # A ping that measures the bandwidth delays those above while it is unanswered, for 60 s by default.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
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

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    ("grpc.keepalive_permit_without_calls", 1),
    # Allows the pings of CHANNEL_OPTIONS; the default closes the connections of clients that ping so often.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # A burst waits for the event loop; by default, calls of a burst beyond 1,000 are mostly refused without a log line.
    # Each takes 10 KB, and nobody knows yet who makes it.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # One connection cannot take all the calls of a server; a client with more calls waits or opens another channel.
    ("grpc.max_concurrent_streams", CONNECTION_CALLS),
    # Clients connect again when they call.
    ("grpc.max_connection_idle_ms", 300_000),
    # Nobody asks for gRPC's own statistics of connections and calls, which take memory for each.
    ("grpc.enable_channelz", 0),
    # Disconnects a client that connects and sends nothing; the default waits for two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # The second of two processes with the same port must fail instead of sharing its connections.
    ("grpc.so_reuseport", 0),
)
