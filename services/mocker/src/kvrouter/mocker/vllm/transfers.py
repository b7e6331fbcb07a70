"""Parameters of KV transfers between a prefill and a decode server, in the format of vLLM's NIXL connector.

No blocks are transferred: the decode server computes the prompt by itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.generations import Sequenced

_LEASE_SECONDS = 480.0
"""Time for which a prefill server keeps blocks for a decode server, vLLM's default."""
_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port", "remote_request_id")


class KvTransfers:
    """What a server says and expects of transfers."""

    def __init__(self, *, role: str, host: str, port: int, block_size: int) -> None:
        """Args:
        role: "both", "prefill" or "decode"; a server with "both" has no connector.
        host: Host of the side channel.
        port: Port of the side channel.
        block_size: Tokens per block.
        """  # noqa: D205
        self._role = role
        self._host = host
        self._port = port
        self._block_size = block_size
        self._engine_id = str(uuid.uuid4())
        self._next_block = 1

    def begin(self, params: Mapping[str, Any] | None) -> None:
        """Checks the parameters of a request.

        Raises:
            ApiError: the server is to load blocks, and it is not said from where.
        """
        if self._role == "decode" and params and params.get("do_remote_prefill"):
            missing = [name for name in _REMOTE if params.get(name) is None]
            if missing:
                raise ApiError(400, f"kv_transfer_params: expected {', '.join(missing)}", param="kv_transfer_params")

    def end(self, params: Mapping[str, Any] | None, sequence: Sequenced, dp_rank: int) -> dict[str, Any] | None:
        """Returns what the response says of the transfer; None without one."""
        if self._role != "prefill" or not params or not params.get("do_remote_decode"):
            return None
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
            "remote_port": self._port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": time.time() + _LEASE_SECONDS,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        }
