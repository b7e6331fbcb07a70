"""Decides which descriptor of a component its readers follow.

The key of a descriptor belongs to all workers of a component, so one of them could replace it. A descriptor counts only
as far as live workers agree with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TypeAlias

from kvrouter.v1.common_pb2 import Component, Role
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration

_OUTVOTE = 2
"""Workers that must agree before they outvote a written descriptor. One worker alone never does."""

_Shared: TypeAlias = tuple[str, int, str, int, int]


def followed_descriptor(
    name: ComponentName,
    written: ComponentDescriptor | None,
    former: ComponentDescriptor | None,
    workers: Collection[WorkerRegistration],
) -> ComponentDescriptor | None:
    """Returns the descriptor to follow; None if nothing describes the component.

    Each live worker has one vote for the properties in its registration. The former descriptor stays while it has as
    many votes as any other. Then the written one counts, unless at least two workers outvote it. If there is none, most
    votes decide, and of as many votes the lowest worker id.

    Args:
        name: The component.
        written: Its descriptor in etcd.
        former: The descriptor followed so far.
        workers: Its registered workers.
    """
    votes = Counter(map(_shared, workers))
    if not votes:
        return written
    most = max(votes.values())
    if former is not None and votes[_shared(former)] == most:
        return former
    if written is not None and (votes[_shared(written)] == most or most < _OUTVOTE):
        return written
    return _described(
        name, min((each for each in workers if votes[_shared(each)] == most), key=lambda each: each.worker_id)
    )


def _shared(entry: ComponentDescriptor | WorkerRegistration) -> _Shared:
    role = entry.role or Role.ROLE_BOTH
    return entry.model, entry.block_size, entry.hash_scheme, role, entry.max_model_len


def _described(name: ComponentName, worker: WorkerRegistration) -> ComponentDescriptor:
    return ComponentDescriptor(
        component=Component(namespace=name.namespace, name=name.name),
        model=worker.model,
        block_size=worker.block_size,
        hash_scheme=worker.hash_scheme,
        default_transport=worker.transport,
        role=worker.role or Role.ROLE_BOTH,
        max_model_len=worker.max_model_len or None,
    )
