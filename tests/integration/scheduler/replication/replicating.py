"""Schedulers that sync over a real NATS, and what they know of each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvrouter.core import Rank
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import GetStatusRequest

from ..scheduling import Stack, eventually, scheduling, soon

Agreement = dict[tuple[str, int], tuple[int, int, int]]
"""(router, incarnation) → (next sequence, bookings, digest)"""


@asynccontextmanager
async def replicas(
    count: int, namespace: str, etcd: str, nats_url: str | Sequence[str], **options: Any
) -> AsyncIterator[list[Stack]]:
    """Schedulers with sync, which hear each other, and two workers that all of them know.

    ``nats_url`` may be one for each.
    """
    urls = [nats_url] * count if isinstance(nats_url, str) else nats_url
    component = ComponentName(namespace, "pool")
    known: dict[str, Any] = {"replica_sync": True, "replica_heartbeat_seconds": 0.1, "router_mode": "kv"}
    async with AsyncExitStack() as exits:
        stacks = [
            await exits.enter_async_context(
                scheduling(component, etcd, urls[number], how="object", instance_id=f"s{number}", **(known | options))
            )
            for number in range(count)
        ]
        for stack in stacks:
            await stack.register(1, 2)
        # Who hears all others is subscribed, and so are they: from here on nothing is missed but what a test cuts.
        await agreed(stacks)
        yield stacks


async def agreement(stack: Stack) -> Agreement:
    """What a Scheduler knows of all, itself included."""
    status = await stack.scheduler.get_status(GetStatusRequest(component=stack.named), deadline=soon())
    return {
        (each.scheduler_id, each.incarnation): (each.next_sequence, each.bookings, each.digest)
        for each in status.components[0].replicas
        if each.complete
    }


async def agreed(stacks: list[Stack]) -> Agreement:
    """Waits until all know the same of all: equal sequences, equal digests; and have the same load."""

    async def ask() -> list[tuple[Agreement, list[Any]]]:
        return [(await agreement(stack), await ranks(stack)) for stack in stacks]

    found = await eventually(
        ask, lambda seen: len(seen[0][0]) == len(stacks) and all(each == seen[0] for each in seen[1:])
    )
    return found[0][0]


async def ranks(stack: Stack) -> list[tuple[Rank, int, int, int]]:
    """(rank, active blocks, prefill tokens, requests) of every rank."""
    status = await stack.scheduler.get_status(GetStatusRequest(component=stack.named), deadline=soon())
    return [
        ((each.rank.worker_id, each.rank.dp_rank), each.active_blocks, each.prefill_tokens, each.active_requests)
        for each in status.components[0].ranks
    ]


def figure(stack: Stack, name: str, **labels: str) -> float:
    return stack.runtime.registry.get_sample_value(f"kvrouter_scheduler_{name}", labels) or 0.0


def disconnects(stack: Stack) -> float:
    return stack.runtime.registry.get_sample_value("kvrouter_nats_disconnects_total") or 0.0


async def reaches(value: Callable[[], float], least: float) -> None:
    async def ask() -> float:
        return value()

    await eventually(ask, lambda found: found >= least)
