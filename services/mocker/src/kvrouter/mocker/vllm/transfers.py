"""KV transfers between a prefill and a decode server, with the parameters of vLLM's NIXL connector.

No blocks are transferred: a decode server computes the prompt by itself. But it asks the prefill server for the blocks,
which are there once, until their lease expires; without them its request fails, as with vLLM's default policy.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.generations import Sequenced

LEASE_SECONDS = 480.0
"""Time for which a prefill server keeps blocks for a decode server, vLLM's default."""
_PULL_SECONDS = 30.0
_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id")


class KvTransfers:
    """The transfers of one server."""

    def __init__(self, *, role: str, host: str, block_size: int, clock: Callable[[], float] = time.time) -> None:
        """Args:
        role: "both", "prefill" or "decode"; a server with "both" has no connector.
        host: Host at which decode servers reach this one.
        block_size: Tokens per block.
        clock: Returns the time in seconds since 1970.
        """  # noqa: D205
        self.port = 0
        """Port at which decode servers reach this one, once it listens."""
        self._role = role
        self._host = host
        self._block_size = block_size
        self._clock = clock
        self._engine_id = str(uuid.uuid4())
        self._next_block = 1
        self._expiries: dict[str, float] = {}
        """Request id → end of the lease on its blocks."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Returns the routes, which stand for vLLM's side channel."""
        return [web.delete("/mock/transfers/{request_id}", self.take)]

    async def take(self, request: web.Request) -> web.Response:
        """Hands the blocks of a request over to a decode server: returns 200, or 404 if there are none."""
        expiry = self._expiries.pop(request.match_info["request_id"], 0.0)
        return web.Response(status=200 if expiry > self._clock() else 404)

    async def receive(self, params: Mapping[str, Any] | None) -> None:
        """Fetches the blocks of a prompt, if a request says where they are.

        Raises:
            ApiError: it says so incompletely, or the blocks are not there.
        """
        if self._role != "decode" or not params or not params.get("do_remote_prefill"):
            return
        missing = [name for name in _REMOTE if params.get(name) is None]
        if missing:
            raise ApiError(400, f"kv_transfer_params: expected {', '.join(missing)}", param="kv_transfer_params")
        url = f"http://{params['remote_host']}:{params['remote_port']}/mock/transfers/{params['remote_request_id']}"
        timeout = aiohttp.ClientTimeout(total=_PULL_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.delete(url) as response:
                if response.status != 200:
                    raise ApiError(500, f"KV load failure: {url} answered {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(500, f"KV load failure: {url} does not answer: {error}") from None

    def offer(self, params: Mapping[str, Any] | None, sequence: Sequenced, dp_rank: int) -> dict[str, Any] | None:
        """Leases the blocks of a prompt to a decode server; returns what that needs, None if it is not asked for."""
        if self._role != "prefill" or not params or not params.get("do_remote_decode"):
            return None
        now = self._clock()
        self._expiries = {each: expiry for each, expiry in self._expiries.items() if expiry > now}
        self._expiries[sequence.request_id] = now + LEASE_SECONDS
        tokens = len(sequence.prompt)
        blocks = -(-tokens // self._block_size)
        first, self._next_block = self._next_block, self._next_block + blocks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(first, first + blocks))],
            "remote_engine_id": f"{self._engine_id}_dp{dp_rank}",
            "remote_request_id": sequence.request_id,
            "remote_host": self._host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": now + LEASE_SECONDS,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        }
