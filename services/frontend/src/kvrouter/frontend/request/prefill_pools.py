"""The prefill pools of a decode pool, and the hand-over of engines running a request at the same time. Pure.

Both workers, of SGLang for example, receive the prefill worker's bootstrap address and the number of a room to meet in.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvrouter.engines.transfers import SGLANG_TRANSFER
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import Rank, Role
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import TransferParams


class PrefillPools(NamedTuple):
    """The prefill pools that can compute prompts for a decode pool."""

    views: tuple[ComponentView, ...]
    """The pools with live workers, in order of name."""
    why_none: str = ""
    """Why there is none, in English; empty if there is one."""


def is_disaggregated(view: ComponentView) -> bool:
    """Returns whether the prompts of a component's requests can be computed by prefill workers."""
    return view.descriptor.role == Role.ROLE_DECODE


def prefill_pools(
    decode: ComponentView,
    components: Iterable[ComponentView],
    can_prefill: Callable[[WorkerRegistration], bool] = lambda _: True,
) -> PrefillPools:
    """Returns the pools of a decode pool's model and namespace whose blocks have its size."""
    model, block_size = decode.descriptor.model, decode.descriptor.block_size
    of_model = [
        view
        for view in components
        if view.descriptor.role == Role.ROLE_PREFILL
        and view.descriptor.model == model
        and view.name.namespace == decode.name.namespace
    ]
    if not of_model:
        return PrefillPools((), f"no prefill pool serves {model}")
    matching = [view for view in of_model if view.descriptor.block_size == block_size]
    if not matching:
        sizes = ", ".join(sorted(f"{view.name} has {view.descriptor.block_size}" for view in of_model))
        return PrefillPools((), f"no prefill pool has blocks of {block_size} tokens: {sizes}")
    live = [
        view
        for view in matching
        if any(not worker.draining and can_prefill(worker) for worker in view.workers.values())
    ]
    if not live:
        return PrefillPools((), f"no prefill worker of {model} can serve the request")
    return PrefillPools(tuple(sorted(live, key=lambda view: str(view.name))))


_ROOM_BITS = 62


def runs_concurrently(worker: WorkerRegistration | None) -> bool:
    """Returns whether decode workers meet a prefill worker while it computes the prompt."""
    return worker is not None and bool(worker.bootstrap_endpoint)


def draw_room(worker: WorkerRegistration, rank: Rank) -> TransferParams:
    """Returns the parameters of a hand-over by a prefill worker, in a random room.

    The room modulo the number of ranks is the prefill rank, by which SGLang finds it.
    """
    host, _, port = worker.bootstrap_endpoint.rpartition(":")
    ranks = max(1, len(worker.ranks))
    room = secrets.randbits(_ROOM_BITS) // ranks * ranks + rank.dp_rank
    payload = {"bootstrap_host": host.strip("[]"), "bootstrap_port": int(port), "bootstrap_room": room}
    return TransferParams(format=SGLANG_TRANSFER, payload=json.dumps(payload).encode())
