"""Writes the descriptors of components whose workers may not write them."""

from __future__ import annotations

import asyncio

import structlog
from kvrouter.net.etcd import AWAY, EtcdAccess, connect
from kvrouter.runtime.discovery.directory import ComponentView, Directory

log = structlog.get_logger(component="scheduler")

_RETRY_SECONDS = 5.0


async def write_descriptors(directory: Directory, etcd: EtcdAccess) -> None:
    """Writes the followed descriptor of each component without one in etcd, until cancelled.

    So it outlives the component's workers, and later workers are compared with it.
    """
    async for current in directory.changes():
        while missing := [view for view in current.components.values() if not view.is_written]:
            try:
                await _write(etcd, missing)
            except AWAY as error:
                log.warning("descriptor.not_written", error=str(error), components=[str(view.name) for view in missing])
            try:
                async with asyncio.timeout(_RETRY_SECONDS):
                    await current.changed()
            except TimeoutError:
                continue


async def _write(etcd: EtcdAccess, views: list[ComponentView]) -> None:
    async with connect(etcd) as client:
        for view in views:
            key = view.name.descriptor_key.encode()
            written, _responses = await client.transaction(
                compare=[client.transactions.create(key) == 0],
                success=[client.transactions.put(key, view.descriptor.SerializeToString())],
                failure=[],
            )
            if written:
                log.info("descriptor.written", component_name=str(view.name), model=view.model)
