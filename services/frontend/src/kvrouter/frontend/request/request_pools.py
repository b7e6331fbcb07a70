"""The pools of a model that can serve one request, and the choice among them at each attempt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvrouter.frontend.packed_prompt import TOKEN_BYTES, hash_prompt
from kvrouter.frontend.request.attempt_input import routing_request
from kvrouter.frontend.request.prefill_stage import PrefillStage
from kvrouter.frontend.request.validation import can_take
from kvrouter.frontend.schedulers.link_pool import PoolChoice
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.names import ComponentName


@dataclass(slots=True, eq=False)
class RequestPools:
    """Several pools, which may come and go while the request runs."""

    request: FrontendServiceGenerateRequest
    """The request, without token ids."""
    views: Callable[[], Sequence[ComponentView]]
    """Returns the pools serving its model now, at least one, the largest first."""
    choice: PoolChoice
    """Compares pools."""
    health: WorkerHealth
    prefill_stage: Callable[[ComponentView], PrefillStage | None]
    """Returns the request's prefill stage in a pool; None where it has none."""
    is_estimated: bool = False
    """Whether the length of its prompt is an estimate."""

    def largest(self) -> ComponentView:
        """Returns the largest pool that can run the request, or that serves its model if none can. Asks nobody."""
        return self.views()[0]

    def others(self, refused: Collection[ComponentName]) -> bool:
        """Returns whether there is a pool besides those that refused the request."""
        return any(view.name not in refused for view in self.views())

    def has_healthy_worker(self, besides: ComponentName) -> bool:
        """Returns whether a healthy worker of another pool could take the request."""
        constraints, lora_name = self.request.constraints, self.request.scope.lora_name
        return any(
            can_take(worker, constraints, lora_name)
            for view in self.views()
            if view.name != besides
            for worker in self.health.healthy(view.name)
        )

    async def cheapest(
        self,
        prompt: bytes,
        deadline: Deadline,
        *,
        refused: Collection[ComponentName] = (),
        current: RoutingRequest | None = None,
    ) -> ComponentView:
        """Returns the pool in which the request costs least.

        Args:
            prompt: Prompt of the next attempt, a packed buffer.
            deadline: Deadline of the request.
            refused: Pools that have refused it; they are left out unless all have.
            current: The request as the pool of the last attempt would receive it; None before the first attempt.
        """
        views = self.views()
        left = [view for view in views if view.name not in refused] or views
        hashes: dict[int, bytes] = {}

        def routing(view: ComponentView) -> RoutingRequest:
            if current is not None and current.component == view.descriptor.component:
                routed = RoutingRequest()
                routed.CopyFrom(current)
            else:
                size = view.descriptor.block_size
                if size not in hashes:
                    hashes[size] = hash_prompt(prompt, self.request, size)
                tokens = len(prompt) // TOKEN_BYTES
                routed = routing_request(self.request, view, hashes[size], tokens, is_estimated=self.is_estimated)
                routed.constraints.avoided_workers.extend(self.health.avoided(view.name))
            stage = self.prefill_stage(view)
            routed.may_prefill_locally = stage is not None and stage.is_possible
            return routed

        return (await self.choice.cheapest_first(left, routing, deadline))[0]
