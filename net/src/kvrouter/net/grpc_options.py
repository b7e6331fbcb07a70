"""gRPC settings that client and server have to agree on, each set on purpose."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side takes in: sixteen times a prompt of a million tokens; beyond it is a mistake."""

MAX_CALLS = 16_384
"""Calls under way at once in one server, sessions and streams included; further ones get RESOURCE_EXHAUSTED."""

_KEEPALIVE_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000

_BOTH = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Senders set no limit of their own: the receiver's answer is a typed error, a sender's refusal is not.
    ("grpc.max_send_message_length", -1),
    # A peer that vanished without closing its connection (a lost host, a partition) is noticed within 30 s.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    # Sessions are silent while no request is made; their peer's death has to show all the same.
    ("grpc.keepalive_permit_without_calls", 1),
    # Peers that restart are found again within two seconds instead of gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Peers are addressed directly; a proxy from the environment is meant for traffic that leaves the site.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    ("grpc.keepalive_permit_without_calls", 1),
    # Lets clients ping as often as CHANNEL_OPTIONS makes them; the default closes their connections for it.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
    # A burst waits for the event loop; by default, what exceeds 1,000 calls of one is mostly refused unseen.
    ("grpc.server.max_pending_requests", MAX_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    # A client that connects and says nothing is cut off; the default waits for two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Two processes that are given the same port must fail, not share its connections between them.
    ("grpc.so_reuseport", 0),
)
