"""Objects of a Kubernetes API server, listed and then watched for changes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp
import structlog
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import load_incluster_config, load_kube_config
from kubernetes_asyncio.watch import Watch
from kvrouter.sidecar.kubernetes.selection import JsonObject

log = structlog.get_logger(component="kubernetes")

T = TypeVar("T")
Listing: TypeAlias = Callable[..., Awaitable[Any]]
"""A list call of kubernetes_asyncio, which takes further parameters of the query by name."""

_PAGE = 100
"""Objects of one answer to a list, which the event loop parses at once."""
_ANSWER_SECONDS = 30.0
_WATCH_SECONDS = 60
"""The server ends a watch after this time, so a connection that died in silence is noticed."""
_LEAST_WATCH_SECONDS = 1.0
"""A watch that ends earlier without an event is not opened again at once, since that could go on for ever."""
_LONGEST_PAUSE_SECONDS = 5.0
_MOST_OF_CAUSE = 300
"""Characters of a cause that are logged."""
_GONE = 410
_USUAL_FAILURES = 3
"""Failures in a row up to which a 410 is not logged, since a server may forget a version at any time."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_DISCONNECTED = (aiohttp.ClientError, OSError, TimeoutError)
"""Failures of a connection, after which a watch continues where it was. After others the objects are listed anew."""


class FollowedObjects(Generic[T]):
    """The objects of one list call, by name."""

    def __init__(self, listing: Callable[[ApiClient, str], Listing], read: Callable[[JsonObject], T]) -> None:
        """Sends nothing yet.

        Args:
            listing: Returns the list call. Its second argument is the namespace of this process.
            read: Returns what to keep of an object.
        """
        self._listing = listing
        self._read = read
        self._objects: dict[str, T] = {}
        self._version = ""
        """Version of the last change; empty to list all objects anew."""
        self._failures = 0
        self._cause = ""
        self._held = True
        """Whether the last watch had an event, or lasted for a while."""
        self.is_current = False
        """Whether changes arrive: False until the first list, and while the API server is away or refuses."""

    async def changes(self) -> AsyncGenerator[Mapping[str, T]]:
        """Yields all objects, at once and after each change, for ever. Each mapping is valid until the next one.

        While the API server is away or refuses, nothing is yielded. Tokens and certificates are read again then.
        """
        while True:
            try:
                async with _connected() as (client, namespace), aclosing(self._follow(client, namespace)) as following:
                    async for objects in following:
                        yield objects
            except _DISCONNECTED as error:
                self._failed(error)
            except Exception as error:  # kubernetes_asyncio raises bare ones for what it cannot read
                self._version = ""
                self._failed(error)
            await asyncio.sleep(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.1 * 2 ** min(self._failures, 10))))

    async def _follow(self, client: ApiClient, namespace: str) -> AsyncGenerator[Mapping[str, T]]:
        """Yields until the connection fails, or a watch ended at once."""
        listing = self._listing(client, namespace)
        self._held = True
        while self._held:
            if not self._version:
                await self._list(listing)
                yield self._objects
            self._held = False
            async with aclosing(self._watch(listing)) as watching:
                async for objects in watching:
                    yield objects
        self._failures += 1

    async def _watch(self, listing: Listing) -> AsyncGenerator[Mapping[str, T]]:
        """Yields until the server ends the watch."""
        timer: asyncio.TimerHandle | None = None

        async def opened(**query: Any) -> aiohttp.ClientResponse:
            """Opens the watch, which holds if it neither ends nor fails soon."""
            nonlocal timer
            response: aiohttp.ClientResponse = await listing(**query)
            if response.status == 200:
                timer = asyncio.get_running_loop().call_later(_LEAST_WATCH_SECONDS, self._succeeded)
            return response

        watch = Watch("object").stream(
            opened,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_SECONDS,
            _request_timeout=aiohttp.ClientTimeout(total=_WATCH_SECONDS + _ANSWER_SECONDS, connect=_ANSWER_SECONDS),
        )
        try:
            async with watch:
                async for event in watch:
                    if self._apply(event["type"], event["raw_object"]):
                        yield self._objects
                    self._succeeded()
        finally:
            if timer is not None:
                timer.cancel()

    async def _list(self, listing: Listing) -> None:
        objects: dict[str, T] = {}
        page: dict[str, Any] = {"metadata": {"continue": ""}}
        while True:
            response = await listing(
                limit=_PAGE,
                _continue=page["metadata"]["continue"],
                _preload_content=False,
                _request_timeout=_ANSWER_SECONDS,
            )
            async with response:
                if response.status != 200:
                    raise ApiException(status=response.status, reason=await _reason(response))
                page = await response.json()
            objects |= {each["metadata"]["name"]: self._read(each) for each in page["items"]}
            if not page["metadata"].get("continue"):
                break
        self._objects, self._version = objects, page["metadata"]["resourceVersion"]
        self.is_current = True

    def _apply(self, kind: str, changed: JsonObject) -> bool:
        """Returns whether the objects may have changed."""
        metadata = changed["metadata"]
        if kind in {"ADDED", "MODIFIED"}:
            self._objects[metadata["name"]] = self._read(changed)
        elif kind == "DELETED":
            self._objects.pop(metadata["name"], None)
        self._version = metadata["resourceVersion"]
        return kind != "BOOKMARK"

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if isinstance(error, ApiException) and error.status == _GONE and self._failures <= _USUAL_FAILURES:
            return  # The server has forgotten the version, as it may at any time.
        self.is_current = False
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ApiException):
            cause = f"the API server answers {error.status}: {error.reason}"
        cause = cause.splitlines()[0][:_MOST_OF_CAUSE]
        if cause != self._cause:
            self._cause = cause
            log.warning("kubernetes.away", cause=cause, consequence="the engines stay as they are")

    def _succeeded(self) -> None:
        self._failures = 0
        self._held = self.is_current = True
        if self._cause:
            self._cause = ""
            log.info("kubernetes.back")


async def _reason(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ContentTypeError):
        return str(response.reason)


@asynccontextmanager
async def _connected() -> AsyncIterator[tuple[ApiClient, str]]:
    """Yields a client of the API server and the namespace of this process: in a pod, its own, else of kubectl."""
    configuration = Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        await asyncio.to_thread(load_incluster_config, client_configuration=configuration)
        namespace = await asyncio.to_thread(_NAMESPACE_FILE.read_text)
    else:
        path = os.environ.get("KUBECONFIG")
        kubectl = await load_kube_config(path, client_configuration=configuration, persist_config=False)
        context = kubectl.current_context or {}
        namespace = context.get("context", {}).get("namespace", "default")
    async with ApiClient(configuration) as client:
        yield client, namespace
