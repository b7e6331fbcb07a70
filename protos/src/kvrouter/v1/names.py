"""Names of etcd keys, JetStream streams and NATS subjects: the part of the contract that protobuf cannot express.

A component is named ``namespace/component``. Both parts consist of letters, digits, ``-`` and ``_``, which are safe in
keys, subjects and stream names alike.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROOT = "/kvrouter/v1"
_WORKER_KEY = re.compile(r"/workers/([0-9a-f]{16})$")
_DRAIN_KEY = re.compile(r"/drains/([0-9a-f]{16})$")


class InvalidName(ValueError):
    """A name has characters not allowed in keys or subjects."""


def check_name(name: str) -> str:
    """Returns the name if it is valid.

    Raises:
        InvalidName: it is empty, longer than 64 characters, or has others than letters, digits, ``-`` and ``_``.
    """
    if not _NAME.fullmatch(name):
        raise InvalidName(f"expected a name of 1 to 64 letters, digits, '-' or '_', received {name[:100]!a}")
    return name


def namespace_prefix(namespace: str) -> str:
    """Returns the prefix of all keys of a namespace."""
    return f"{_ROOT}/{check_name(namespace)}/"


def components_prefix(namespace: str) -> str:
    """Returns the prefix of the keys of all components of a namespace."""
    return f"{namespace_prefix(namespace)}components/"


def services_prefix(namespace: str, kind: str) -> str:
    """Returns the prefix of the registrations of one kind of service: indexer, scheduler or frontend."""
    return f"{namespace_prefix(namespace)}services/{kind}/"


def service_key(namespace: str, kind: str, instance_id: str) -> str:
    """Returns the key of a ServiceRegistration."""
    return services_prefix(namespace, kind) + check_name(instance_id)


def threshold_key(namespace: str, model: str) -> str:
    """Returns the key of a BusyThresholdsRecord. Models may contain slashes."""
    return f"{namespace_prefix(namespace)}thresholds/{model}"


def worker_deaths_subject(namespace: str) -> str:
    """Returns the subject on which the Frontends of a namespace tell each other of deaths of workers."""
    return f"kvrouter.v1.{check_name(namespace)}.worker-deaths"


class _Parts(NamedTuple):
    namespace: str
    name: str


class ComponentName(_Parts):
    """A component's name, and the names derived from it.

    It is a tuple because a request looks up ten entries by it: a dataclass is hashed and compared in Python.
    """

    __slots__ = ()

    def __new__(cls, namespace: str, name: str) -> ComponentName:
        """Raises InvalidName if a part is not a valid name."""
        return super().__new__(cls, check_name(namespace), check_name(name))

    @classmethod
    def parse(cls, text: str) -> ComponentName:
        """Parses ``namespace/component``.

        Raises:
            InvalidName: the text has another form.
        """
        namespace, slash, name = text.partition("/")
        if not slash:
            raise InvalidName(f"expected namespace/component, received {text[:100]!a}")
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
        """Returns the key of a WorkerRegistration."""
        return f"{self.workers_prefix}{worker_id:016x}"

    def incarnation_key(self, worker_id: int) -> str:
        """Returns the key of an IncarnationRecord."""
        return f"{self.prefix}incarnations/{worker_id:016x}"

    def drain_key(self, worker_id: int) -> str:
        """Returns the key of a WorkerDrain."""
        return f"{self.prefix}drains/{worker_id:016x}"

    def applied_key(self, replica_id: str) -> str:
        """Returns the key of an AppliedRecord."""
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
        """Name of the component's JetStream stream of events. Names have no ``=``, so it is unambiguous."""
        return f"kvrouter-v1={self.namespace}={self.name}"

    @property
    def snapshot_bucket(self) -> str:
        """Name of the NATS object store of the component's snapshots."""
        return f"kvrouter-v1-snapshots__{len(self.namespace)}_{self.namespace}_{self.name}"

    @property
    def events_wildcard(self) -> str:
        """Wildcard of the subjects of all ranks' durable events."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.events.>"

    def events_subject(self, worker_id: int, dp_rank: int) -> str:
        """Returns the subject of one rank's durable events."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.events.{worker_id:016x}.{dp_rank}"

    @property
    def live_wildcard(self) -> str:
        """Wildcard of the subjects of all ranks' events over Core NATS."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.live.>"

    def live_subject(self, worker_id: int, dp_rank: int) -> str:
        """Returns the subject of one rank's events over Core NATS."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.live.{worker_id:016x}.{dp_rank}"

    @property
    def load_wildcard(self) -> str:
        """Wildcard of the subjects of all ranks' load reports."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.load.>"

    def load_subject(self, worker_id: int, dp_rank: int) -> str:
        """Returns the subject of one rank's load reports."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.load.{worker_id:016x}.{dp_rank}"

    @property
    def sync_subject(self) -> str:
        """Subject on which Schedulers announce bookings to each other."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.sync"

    def sync_state_subject(self, scheduler_id: str) -> str:
        """Returns the subject on which a Scheduler answers requests for its state."""
        return f"kvrouter.v1.{self.namespace}.{self.name}.sync-state.{check_name(scheduler_id)}"


def worker_id_of_key(key: str) -> int | None:
    """Returns the worker id in a registration's key; None for keys of other kinds."""
    match = _WORKER_KEY.search(key)
    return int(match.group(1), 16) if match else None


def drained_worker_of_key(key: str) -> int | None:
    """Returns the worker id in the key of a drain; None for keys of other kinds."""
    match = _DRAIN_KEY.search(key)
    return int(match.group(1), 16) if match else None
