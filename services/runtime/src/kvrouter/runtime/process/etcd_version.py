"""Warns of an etcd that does not hold its users to their permissions."""

from __future__ import annotations

import re

import structlog
from aetcd import rpc
from kvrouter.net.etcd import AWAY, EtcdAccess, connect
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(component="discovery")

_CALL_SECONDS = 3.0
REPAIRED = ((3, 5, 33), (3, 6, 14), (3, 7, 1))
"""First release of each series that is not affected by CVE-2026-33343, -33413, -44283 and -73499."""


def is_outdated(version: str) -> bool:
    """Returns whether users of this version of etcd can evade their permissions; False for an unknown form."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return False
    numbers = tuple(map(int, found.groups()))
    return numbers < next((first for first in REPAIRED if first[:2] >= numbers[:2]), (0,))


async def warn_if_outdated(etcd: EtcdAccess) -> None:
    """Logs ``etcd.outdated`` if this process has a user in an etcd whose users can evade their permissions."""
    if not etcd.user:
        return
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(AWAY), wait=wait_random_exponential(multiplier=0.5, max=30)
    ):
        with attempt:
            async with connect(etcd) as client:
                # Not `client.status`, which asks for the members as well: only administrators may list them.
                status = client.maintenancestub.Status
                answer = await status(rpc.StatusRequest(), metadata=client.metadata, timeout=_CALL_SECONDS)
                version = str(answer.version)
    if is_outdated(version):
        advice = f"use {', '.join('.'.join(map(str, each)) for each in REPAIRED)} or newer"
        log.warning("etcd.outdated", version=version, consequence="users read and write all keys", advice=advice)
