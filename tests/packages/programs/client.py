"""Uses the client without a Frontend: ``client.py NATS_URL ETCD_ENDPOINT``, which it ignores."""

from __future__ import annotations

import asyncio
import contextlib

from kvrouter.client import Client, NotConnected, SyncClient


async def main() -> None:
    """Receives typed errors."""
    async with Client("127.0.0.1:1", model="m", reconnect_seconds=0) as client:
        with contextlib.suppress(NotConnected):
            await client.generate([1, 2, 3])
            raise AssertionError("nobody listens there")


asyncio.run(main())
try:
    from kvrouter.client import Router
except ImportError as error:
    if "kvrouter-client[router]" not in str(error):
        raise
else:
    raise AssertionError(f"{Router} needs the services")
with SyncClient("127.0.0.1:1", model="m", reconnect_seconds=0) as blocking, contextlib.suppress(NotConnected):
    blocking.best_worker([1, 2, 3], request_id="r")
    raise AssertionError("nobody listens there")
