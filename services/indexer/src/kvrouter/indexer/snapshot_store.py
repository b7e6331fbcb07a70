"""Snapshots as objects in NATS, each under a name of its own."""

from __future__ import annotations

import asyncio
import io

from kvrouter.indexer.snapshot_format import InvalidSnapshot
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.errors import (
    APIError,
    BadObjectMetaError,
    BucketNotFoundError,
    DigestMismatchError,
    NotFoundError,
    ObjectNotFoundError,
)
from nats.js.object_store import ObjectStore

_TRANSFER_SECONDS = 60.0
_GONE = (NotFoundError, ObjectNotFoundError, BucketNotFoundError)
_DAMAGED = (BadObjectMetaError, DigestMismatchError)


class SnapshotStore:
    """The objects of one component. Every call raises ``kvrouter.indexer.consumer.AWAY`` where NATS is away."""

    def __init__(self, js: JetStreamContext, component: ComponentName) -> None:
        self._js = js
        self._bucket = component.snapshot_bucket

    async def put(self, name: str, data: bytes) -> None:
        """Writes an object."""
        store = await self._made()
        async with asyncio.timeout(_TRANSFER_SECONDS):
            await store.put(name, data)

    async def get(self, name: str) -> bytes:
        """Reads an object.

        Raises:
            InvalidSnapshot: it is not there, or not as it was written.
        """
        try:
            store = await self._js.object_store(self._bucket)
            await store.get_info(name)
        except _GONE:
            raise InvalidSnapshot("the object is gone") from None
        except _DAMAGED as error:
            raise InvalidSnapshot(f"the object is damaged: {error!r}") from None
        into = io.BytesIO()
        try:
            async with asyncio.timeout(_TRANSFER_SECONDS):
                await store.get(name, writeinto=into)
        except (*_GONE, *_DAMAGED) as error:
            raise InvalidSnapshot(f"the object is damaged: {error!r}") from None
        except TimeoutError:
            # NATS told of the object a moment ago: its pieces are what is missing.
            raise InvalidSnapshot("pieces of the object are missing") from None
        return into.getvalue()

    async def names(self) -> list[str]:
        """Names of all objects, in order."""
        try:
            store = await self._js.object_store(self._bucket)
            return sorted(info.name for info in await store.list(ignore_deletes=True) if not info.deleted)
        except _GONE:
            return []

    async def delete(self, name: str) -> None:
        """Deletes an object; one that is gone already is fine."""
        try:
            store = await self._js.object_store(self._bucket)
            await store.delete(name)
        except _GONE:
            return

    async def _made(self) -> ObjectStore:
        try:
            return await self._js.object_store(self._bucket)
        except _GONE:
            try:
                return await self._js.create_object_store(self._bucket)
            except APIError:
                # Another replica made it in this moment.
                return await self._js.object_store(self._bucket)
