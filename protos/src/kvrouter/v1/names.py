"""Names of etcd keys, JetStream streams and NATS subjects: the part of the contract that protobuf cannot express.

A component is named ``namespace/component``; both parts consist of letters, digits, ``-`` and ``_``, which makes them
safe in keys, subjects and stream names alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROOT = "/kvrouter/v1"
_WORKER_KEY = re.compile(r"/workers/([0-9a-f]{16})$")


class InvalidName(ValueError):
    """A namespace or component name has characters that are not allowed in keys or subjects."""


def check_name(name: str) -> str:
    """Returns ``name``.

    Raises:
        InvalidName: it is empty, longer than 64 characters, or has others than letters, digits, ``-`` and ``_``.
    """
    if not _NAME.fullmatch(name):
        raise InvalidName(f"{name!r} is not a name: use 1 to 64 letters, digits, '-' or '_'")
    return name


def namespace_prefix(namespace: str) -> str:
    """Prefix of every key of a namespace."""
    return f"{_ROOT}/{check_name(namespace)}/"


def components_prefix(namespace: str) -> str:
    """Prefix of the keys of all components of a namespace."""
    return f"{namespace_prefix(namespace)}components/"


def services_prefix(namespace: str, kind: str) -> str:
    """Prefix of the registrations of the services of one kind: indexer, scheduler or frontend."""
    return f"{namespace_prefix(namespace)}services/{kind}/"


def service_key(namespace: str, kind: str, instance_id: str) -> str:
    """Key of a ServiceRegistration."""
    return services_prefix(namespace, kind) + check_name(instance_id)


def threshold_key(namespace: str, model: str) -> str:
    """Key of a BusyThresholdsRecord; models may contain slashes."""
    return f"{namespace_prefix(namespace)}thresholds/{model}"


@dataclass(frozen=True, slots=True)
class ComponentName:
    """A component, and the names of all that belongs to it."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        check_name(self.namespace)
        check_name(self.name)

    @classmethod
    def parse(cls, text: str) -> ComponentName:
        """Reads ``namespace/component``.

        Raises:
            InvalidName: the text has another form.
        """
        namespace, slash, name = text.partition("/")
        if not slash:
            raise InvalidName(f"{text!r} is not a component: write namespace/component")
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def prefix(self) -> str:
        """Prefix of the component's keys."""
        return f"{components_prefix(self.namespace)}{self.name}/"

    @property
    def descriptor_key(self) -> str:
        """Key of the ComponentDescriptor."""
        return f"{self.prefix}descriptor"

    @property
    def workers_prefix(self) -> str:
        """Prefix of the WorkerRegistrations."""
        return f"{self.prefix}workers/"

    def worker_key(self, worker_id: int) -> str:
        """Key of a WorkerRegistration."""
        return f"{self.workers_prefix}{worker_id:016x}"

    def incarnation_key(self, worker_id: int) -> str:
        """Key of an IncarnationRecord."""
        return f"{self.prefix}incarnations/{worker_id:016x}"

    def applied_key(self, replica_id: str) -> str:
        """Key of an AppliedRecord."""
        return f"{self.prefix}applied/{check_name(replica_id)}"

    @property
    def snapshot_key(self) -> str:
        """Key of the SnapshotPointer."""
        return f"{self.prefix}snapshot"

    @property
    def snapshot_lock_key(self) -> str:
        """Key of the SnapshotLock."""
        return f"{self.prefix}snapshot-lock"

    @property
    def stream(self) -> str:
        """Name of the JetStream stream of the component's events. ``.`` cannot occur, so the two parts stay apart."""
        return f"kvrouter-v1={self.namespace}={self.name}"

    @property
    def snapshot_bucket(self) -> str:
        """Name of the NATS object store of the component's snapshots."""
        return f"kvrouter-v1-snapshots__{len(self.namespace)}_{self.namespace}_{self.name}"

    @property
    def events_wildcard(self) -> str:
        """Subjects of the durable events of every rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.events.>"

    def events_subject(self, worker_id: int, dp_rank: int) -> str:
        """Subject of the durable events of one rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.events.{worker_id:016x}.{dp_rank}"

    @property
    def live_wildcard(self) -> str:
        """Subjects of the Core NATS transport's events of every rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.live.>"

    def live_subject(self, worker_id: int, dp_rank: int) -> str:
        """Subject of the Core NATS transport's events of one rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.live.{worker_id:016x}.{dp_rank}"

    @property
    def load_wildcard(self) -> str:
        """Subjects of the load reports of every rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.load.>"

    def load_subject(self, worker_id: int, dp_rank: int) -> str:
        """Subject of the load reports of one rank."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.load.{worker_id:016x}.{dp_rank}"

    @property
    def sync_subject(self) -> str:
        """Subject on which Schedulers tell each other of bookings."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.sync"

    def sync_state_subject(self, scheduler_id: str) -> str:
        """Subject on which one Scheduler answers requests for its state."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.sync-state.{check_name(scheduler_id)}"


def worker_id_of_key(key: str) -> int | None:
    """The worker that a registration's key names, or None for a key of another kind."""
    match = _WORKER_KEY.search(key)
    return int(match.group(1), 16) if match else None
