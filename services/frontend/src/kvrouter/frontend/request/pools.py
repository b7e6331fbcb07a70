"""Finds the prefill pools of a decode pool. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.registry_pb2 import WorkerRegistration


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
