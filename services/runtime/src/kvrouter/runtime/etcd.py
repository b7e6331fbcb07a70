"""etcd for services: leases and watches that outlive its absence.

They live in the publisher SDK, which is released apart and cannot import the runtime; services take them from here.
"""

from kvrouter.publisher.etcd import (
    AWAY,
    Change,
    Delete,
    EtcdAway,
    InvalidEndpoint,
    LeasedKeys,
    Put,
    Snapshot,
    TakenOver,
    connect,
    watch_prefix,
)

__all__ = [
    "AWAY",
    "Change",
    "Delete",
    "EtcdAway",
    "InvalidEndpoint",
    "LeasedKeys",
    "Put",
    "Snapshot",
    "TakenOver",
    "connect",
    "watch_prefix",
]
