"""Runs programs written for Dynamo's ``KvPushRouter`` on a Frontend of kvrouter.

Only the import of such a program changes::

    from kvrouter.client.dynamo import DistributedRuntime, KvPushRouter, KvRouterConfig

The Frontend's address is in the environment variable ``KVROUTER_FRONTEND``. Its workers run where they run: the runtime
only names the component.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any, Self, Unpack

from kvrouter.client.client import Client
from kvrouter.client.options import GenerateOptions, Prompt, RouterConfigOverride, RoutingOptions
from kvrouter.client.results import Model, PotentialLoad
from kvrouter.v1.errors import BadRequest

ADDRESS_VARIABLE = "KVROUTER_FRONTEND"
DEFAULT_ADDRESS = "127.0.0.1:8001"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of a component. Its workers are those of the component."""

    runtime: DistributedRuntime
    component: str
    """The component, namespace/name; empty for the only one served."""
    name: str


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a namespace."""

    runtime: DistributedRuntime
    namespace: str
    name: str

    def endpoint(self, name: str) -> Endpoint:
        """Returns an endpoint of the component."""
        return Endpoint(self.runtime, f"{self.namespace}/{self.name}", name)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of components."""

    runtime: DistributedRuntime
    name: str

    def component(self, name: str) -> Component:
        """Returns a component of the namespace."""
        return Component(self.runtime, self.name, name)


@dataclass(frozen=True, slots=True)
class DistributedRuntime:
    """Names components, and has the address of their Frontend."""

    address: str

    @classmethod
    def detached(cls) -> Self:
        """Returns the runtime of the Frontend the environment names."""
        return cls(os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS)

    def namespace(self, name: str) -> Namespace:
        """Returns a namespace."""
        return Namespace(self, name)


class KvRouterConfig:
    """Options of a router. The Frontend has options of its own, so any other than the defaults is refused."""

    def __init__(self, **options: object) -> None:
        if options:
            raise BadRequest(
                f"KvRouterConfig: {', '.join(sorted(options))} cannot be set by a client",
                field="kv_router_config",
                advice="Start the Frontend and Scheduler with these options, or pass router_config_override.",
            )


class KvPushRouter:
    """Has Dynamo's methods and results: outputs are dictionaries, workers are tuples.

    It connects at its first call, and belongs to its event loop.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,  # noqa: ARG002
    ) -> None:
        self._endpoint = endpoint
        self._block_size = block_size
        self._client = Client(endpoint.runtime.address)
        self._model: Model | None = None
        self._entered = False
        self._connecting = asyncio.Lock()

    async def generate(
        self, token_ids: Prompt, model: str = "", **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Routes a request and runs it; returns its outputs as dictionaries with ``token_ids``."""
        served = await self._served()
        generation = await self._client.generate(token_ids, model or served.name, **options)

        async def outputs() -> AsyncGenerator[dict[str, Any], None]:
            async with generation:
                async for output in generation:
                    yield asdict(output)

        return outputs()

    async def best_worker(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
    ) -> tuple[int, int, int]:
        """Returns worker id, rank and overlap blocks of the worker a request would go to."""
        model = (await self._served()).name
        best = await self._client.best_worker(token_ids, router_config_override, request_id, model=model)
        return best.worker_id, best.dp_rank, best.overlap_blocks

    async def best_worker_id(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
    ) -> tuple[int, int]:
        """Returns worker id and overlap blocks of the worker a request would go to."""
        worker_id, _, overlap_blocks = await self.best_worker(token_ids, router_config_override, request_id)
        return worker_id, overlap_blocks

    async def get_potential_loads(self, token_ids: Prompt, **options: Unpack[RoutingOptions]) -> list[PotentialLoad]:
        """Returns the load every rank would have with a request."""
        return await self._client.get_potential_loads(token_ids, model=(await self._served()).name, **options)

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Reports the first token of a booked request."""
        await self._served()
        await self._client.mark_prefill_complete(request_id)

    async def free(self, request_id: str) -> None:
        """Ends a booking."""
        await self._served()
        await self._client.free(request_id)

    async def dump_events(self) -> str:
        """Returns the index as JSON."""
        return await self._client.dump_events(model=(await self._served()).name)

    async def aclose(self) -> None:
        """Releases the bookings and closes the connection. Dynamo has no such call; a program may leave it out."""
        await self._client.__aexit__(None, None, None)

    async def _served(self) -> Model:
        """Returns the model of the component; the first call connects.

        Raises:
            BadRequest: the component is not served, or its block size is another one.
        """
        async with self._connecting:
            if self._model is not None:
                return self._model
            if not self._entered:
                self._entered = True
                await self._client.__aenter__()
            models = {model.component: model for model in await self._client.list_models()}
            served = models.get(self._endpoint.component)
            if served is None:
                raise BadRequest(
                    f"no component is named {self._endpoint.component!r}",
                    field="endpoint",
                    advice=f"Use one of: {', '.join(sorted(models)) or 'none, start a worker'}.",
                )
            if served.block_size != self._block_size:
                raise BadRequest(
                    f"expected the component's block size {served.block_size}, received {self._block_size}",
                    field="block_size",
                    advice=f"Pass {served.block_size}.",
                )
            self._model = served
            return served
