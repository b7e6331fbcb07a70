"""What each process may do in NATS and etcd, and the configuration that grants just that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrouter.v1.names import (
    ComponentName,
    components_prefix,
    namespace_prefix,
    services_prefix,
    worker_deaths_subject,
)

SERVICES_ACCOUNT = "KVROUTER"
"""NATS account of the services and administrators. It has the streams."""


@dataclass(frozen=True, slots=True)
class Account:
    """The identity of one process, or of all replicas of a service."""

    role: str
    """frontend, scheduler, indexer, worker or admin."""
    worker_id: int = 0
    """The only worker id that a worker may use."""
    component: str = ""
    """Component of a worker."""

    @property
    def name(self) -> str:
        """Name of the user in NATS and etcd, and of its files."""
        return f"worker-{self.worker_id:016x}" if self.role == "worker" else self.role

    @property
    def inbox_prefix(self) -> str:
        """Prefix of its reply subjects, which nobody else may read."""
        return f"_INBOX_{self.name}"


@dataclass(frozen=True, slots=True)
class Grant:
    """A right in etcd on a key or, if it ends with a slash, on all keys below."""

    kind: str
    """read, or readwrite."""
    key: str


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace with its components."""

    name: str
    components: tuple[str, ...]

    def named(self) -> list[ComponentName]:
        """Returns the full names of the components."""
        return [ComponentName(self.name, component) for component in self.components]


def publish_subjects(account: Account, namespace: Namespace) -> list[str]:
    """Returns the NATS subjects to which an account may publish."""
    if account.role == "worker":
        own = f"kvrouter.v1.{namespace.name}.{account.component}.{{}}.{account.worker_id:016x}.*"
        return [own.format(kind) for kind in ("events", "live", "load")]
    if account.role == "indexer":
        subjects = ["$JS.API.STREAM.NAMES", "$JS.FC.>"]
        for component in namespace.named():
            subjects += _managed_stream(component.stream)
            subjects += [*_managed_stream(f"OBJ_{component.snapshot_bucket}"), f"$O.{component.snapshot_bucket}.>"]
        return subjects
    if account.role == "scheduler":
        names = [f"kvrouter.v1.{namespace.name}.{component}" for component in namespace.components]
        # Schedulers answer each other's requests for state.
        return [*(f"{name}.{kind}" for name in names for kind in ("sync", "sync-state.*")), f"{account.inbox_prefix}.>"]
    return [worker_deaths_subject(namespace.name)] if account.role == "frontend" else [">"]


def subscribe_subjects(account: Account, namespace: Namespace) -> list[str]:
    """Returns the NATS subjects that an account may read."""
    inbox = f"{account.inbox_prefix}.>"
    names = [f"kvrouter.v1.{namespace.name}.{component}" for component in namespace.components]
    if account.role == "indexer":
        return [inbox, *(f"{name}.live.>" for name in names)]
    if account.role == "scheduler":
        return [inbox, *(f"{name}.{kind}" for name in names for kind in ("load.>", "sync", "sync-state.*"))]
    if account.role == "frontend":
        return [inbox, worker_deaths_subject(namespace.name)]
    return [">"] if account.role == "admin" else [inbox]


def _managed_stream(stream: str) -> list[str]:
    kinds = ("INFO", "CREATE", "UPDATE", "DELETE", "PURGE")
    return [*(f"$JS.API.STREAM.{kind}.{stream}" for kind in kinds), *_reading(stream)]


def _reading(stream: str) -> list[str]:
    return [
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.*.{stream}.>",
        f"$JS.API.CONSUMER.*.*.{stream}.>",
        f"$JS.ACK.{stream}.>",
    ]


def etcd_grants(account: Account, namespace: Namespace) -> list[Grant]:
    """Returns the rights of an account in etcd."""
    everything = namespace_prefix(namespace.name)
    if account.role == "admin":
        return [Grant("readwrite", everything)]
    if account.role == "worker":
        component = ComponentName(namespace.name, account.component)
        own = (component.worker_key(account.worker_id), component.incarnation_key(account.worker_id))
        return [Grant("read", component.descriptor_key), *(Grant("readwrite", key) for key in own)]
    grants = [Grant("read", everything), Grant("readwrite", services_prefix(namespace.name, account.role))]
    if account.role == "scheduler":
        grants.append(Grant("readwrite", f"{everything}thresholds/"))
        prefix = components_prefix(namespace.name)
        grants += [Grant("readwrite", f"{prefix}{component}/drains/") for component in namespace.components]
        # A component's first descriptor.
        grants += [Grant("readwrite", component.descriptor_key) for component in namespace.named()]
    if account.role == "indexer":
        for component in namespace.named():
            grants += [Grant("readwrite", key) for key in (component.snapshot_key, component.snapshot_lock_key)]
            grants.append(Grant("readwrite", f"{components_prefix(namespace.name)}{component.name}/applied/"))
    return grants


def nats_accounts(accounts: Iterable[tuple[Account, str]], namespace: Namespace) -> str:
    """Returns the block ``accounts`` of a nats-server's configuration.

    Services share an account. Each worker has one of its own, without JetStream, out of which only its own subjects
    lead. The server answers a worker in its account: a reply subject of the services leads nowhere there.

    Args:
        accounts: Each account with its public NKEY; the seed stays with its holder.
        namespace: The namespace that they use.
    """
    users = [(account, _user(account, public_key, namespace)) for account, public_key in accounts]
    workers = [(account, user) for account, user in users if account.role == "worker"]
    exports = [
        f"      {{ service: {json.dumps(subject)}, accounts: [{worker.name}] }}"
        for worker, _ in workers
        for subject in publish_subjects(worker, namespace)
    ]
    lines = [
        "accounts {",
        f"  {SERVICES_ACCOUNT}: {{",
        "    jetstream: enabled",
        *("    users: [", *(line for account, user in users if account.role != "worker" for line in user), "    ]"),
        *("    exports: [", *exports, "    ]"),
        "  }",
    ]
    for worker, user in workers:
        imports = [
            f"      {{ service: {{ account: {SERVICES_ACCOUNT}, subject: {json.dumps(subject)} }} }}"
            for subject in publish_subjects(worker, namespace)
        ]
        lines += [
            f"  {worker.name}: {{",
            *("    users: [", *user, "    ]"),
            *("    imports: [", *imports, "    ]"),
            "  }",
        ]
    return "\n".join([*lines, "}", ""])


def _user(account: Account, public_key: str, namespace: Namespace) -> list[str]:
    return [
        f"      # {account.name}",
        f"      {{ nkey: {public_key}",
        "        permissions: {",
        f"          publish: {{ allow: {_listed(publish_subjects(account, namespace))} }}",
        f"          subscribe: {{ allow: {_listed(subscribe_subjects(account, namespace))} }}",
        "        } }",
    ]


def _listed(subjects: Sequence[str]) -> str:
    return "[" + "".join(f"\n            {json.dumps(subject)}" for subject in subjects) + "\n          ]"


def etcd_commands(account: Account, namespace: Namespace) -> list[list[str]]:
    """Returns the arguments of ``etcdctl`` that create an account's role and user; its password comes from stdin."""
    commands = [["role", "add", account.name]]
    for grant in etcd_grants(account, namespace):
        prefix = ["--prefix=true"] if grant.key.endswith("/") else []
        commands.append(["role", "grant-permission", *prefix, account.name, grant.kind, grant.key])
    return [
        *commands,
        ["user", "add", account.name, "--interactive=false"],
        ["user", "grant-role", account.name, account.name],
    ]
