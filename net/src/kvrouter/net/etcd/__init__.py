"""Leases and watches on etcd, which survive its absence.

Each lease and each watch has a connection of its own, so a lost connection disturbs no other.
"""

from kvrouter.net.etcd.access import EtcdAccess, InvalidEndpoint, parse_endpoints
from kvrouter.net.etcd.connection import AWAY, EtcdAway, EtcdRefused, connect, is_forbidden
from kvrouter.net.etcd.leased_keys import DEFAULT_TTL_SECONDS, KeyTaken, LeasedKeys
from kvrouter.net.etcd.watch import Change, Delete, Put, Snapshot, watch_prefix

__all__ = [
    "AWAY",
    "DEFAULT_TTL_SECONDS",
    "Change",
    "Delete",
    "EtcdAccess",
    "EtcdAway",
    "EtcdRefused",
    "InvalidEndpoint",
    "KeyTaken",
    "LeasedKeys",
    "Put",
    "Snapshot",
    "connect",
    "is_forbidden",
    "parse_endpoints",
    "watch_prefix",
]
