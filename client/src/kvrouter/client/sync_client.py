"""The blocking client: an asyncio client in the event loop of a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from kvrouter.client.client import DEFAULT_RECONNECT_SECONDS, DEFAULT_TIMEOUT_SECONDS, Client
from kvrouter.client.errors import ClientClosed
from kvrouter.client.options import (
    GenerateOptions,
    OutputOptions,
    Prompt,
    RequestOptions,
    RouterConfigOverride,
    RoutingOptions,
)
from kvrouter.client.results import BestWorker, Generation, Model, Output, PotentialLoad, Routing

T = TypeVar("T")


class SyncGeneration(Iterator[Output]):
    """The output of a request, piece by piece. Closing it before its end cancels the request."""

    def __init__(self, generation: Generation, run: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]) -> None:
        """``run`` runs a coroutine function in the client's loop and returns its result."""
        self._generation = generation
        self._run = run

    @property
    def routing(self) -> Routing:
        """How the request was routed; after a retry, how its last attempt was."""
        return self._generation.routing

    def __next__(self) -> Output:
        """Returns the next piece.

        Raises:
            KvRouterError: the request failed.
        """
        output: Output | None = self._run(self._next)
        if output is None:
            raise StopIteration
        return output

    def tokens(self) -> list[int]:
        """Returns all token ids left.

        Raises:
            KvRouterError: the request failed.
        """
        tokens: list[int] = self._run(self._generation.tokens)
        return tokens

    def close(self) -> None:
        """Ends the request, if it has not ended."""
        self._run(self._generation.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> Output | None:
        return await anext(self._generation, None)


class SyncClient:
    """Has the calls of ``Client``, blocking. Any number of threads may use it."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        model: str = "",
        api_key: str | Callable[[], str] = "",
        credentials: grpc.ChannelCredentials | None = None,
        name: str = "python",
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        reconnect_seconds: float = DEFAULT_RECONNECT_SECONDS,
    ) -> None:
        """Connects nothing yet. The arguments are those of ``Client``."""
        self._client = Client(
            addresses,
            model=model,
            api_key=api_key,
            credentials=credentials,
            name=name,
            timeout=timeout,
            reconnect_seconds=reconnect_seconds,
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def generate(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> SyncGeneration:
        """Routes a request and runs it; see ``Client.generate``."""
        return self._generation(lambda: self._client.generate(token_ids, model, **options))

    def random(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> SyncGeneration:
        """Runs a request on a worker chosen at random; see ``Client.generate``."""
        return self._generation(lambda: self._client.random(token_ids, model, **options))

    def round_robin(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> SyncGeneration:
        """Runs a request on the workers in turn; see ``Client.generate``."""
        return self._generation(lambda: self._client.round_robin(token_ids, model, **options))

    def direct(
        self,
        worker_id: int,
        token_ids: Prompt | None = None,
        model: str = "",
        *,
        dp_rank: int | None = None,
        **options: Unpack[OutputOptions],
    ) -> SyncGeneration:
        """Runs a request on one worker; see ``Client.direct``."""
        return self._generation(lambda: self._client.direct(worker_id, token_ids, model, dp_rank=dp_rank, **options))

    def best_worker(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
        *,
        model: str = "",
        **options: Unpack[RequestOptions],
    ) -> BestWorker:
        """Returns the worker a request would go to; see ``Client.best_worker``."""
        return self._run(
            lambda: self._client.best_worker(token_ids, router_config_override, request_id, model=model, **options)
        )

    def best_worker_id(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
        *,
        model: str = "",
        **options: Unpack[RequestOptions],
    ) -> tuple[int, int]:
        """Returns worker id and overlap blocks of ``best_worker``; see ``Client.best_worker_id``."""
        return self._run(
            lambda: self._client.best_worker_id(token_ids, router_config_override, request_id, model=model, **options)
        )

    def get_potential_loads(
        self, token_ids: Prompt, *, model: str = "", **options: Unpack[RoutingOptions]
    ) -> list[PotentialLoad]:
        """Returns the load every rank would have with a request; see ``Client.get_potential_loads``."""
        return self._run(lambda: self._client.get_potential_loads(token_ids, model=model, **options))

    def mark_prefill_complete(self, request_id: str) -> bool:
        """Marks the prefill of a booking made by ``best_worker`` as complete. Returns whether the booking exists."""
        return self._run(lambda: self._client.mark_prefill_complete(request_id))

    def free(self, request_id: str) -> bool:
        """Frees a booking made by ``best_worker``. Returns whether it existed."""
        return self._run(lambda: self._client.free(request_id))

    def find_matches_for_request(
        self, token_ids: Prompt, *, model: str = "", **options: Unpack[RoutingOptions]
    ) -> dict[int, int]:
        """Returns the blocks of a prompt each worker has; see ``Client.find_matches_for_request``."""
        return self._run(lambda: self._client.find_matches_for_request(token_ids, model=model, **options))

    def dump_events(self, *, model: str = "", timeout: float | None = None) -> str:
        """Returns the index of a model as JSON; see ``Client.dump_events``."""
        return self._run(lambda: self._client.dump_events(model=model, timeout=timeout))

    def list_models(self) -> list[Model]:
        """Returns the served models."""
        return self._run(self._client.list_models)

    def __enter__(self) -> Self:
        self._loop = background_loop()
        self._run(self._client.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(lambda: self._client.__aexit__(kind, error, trace))

    def _generation(self, call: Callable[[], Coroutine[Any, Any, Generation]]) -> SyncGeneration:
        return SyncGeneration(self._run(call), self._run)

    def _run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._loop is None:
            raise ClientClosed("the client's context is not entered: use it inside of `with`")
        running = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            return running.result()
        finally:
            # An interrupt of this thread must not leave the call running.
            running.cancel()


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon, so that it does not keep the program from ending.
        self.thread = threading.Thread(target=self.loop.run_forever, name="kvrouter clients", daemon=True)
        self.thread.start()


_lock = threading.Lock()
_running: list[_LoopThread] = []


def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all blocking clients. The first call starts its thread, also after a fork.

    It is never closed: grpc.aio delivers the events of all loops of a process through each of them, and fails in the
    others when one is closed.
    """
    with _lock:
        if not (_running and _running[-1].thread.is_alive()):
            _running.append(_LoopThread())
        return _running[-1].loop
