"""The hand-over of engines whose prefill and decode workers run a request at the same time, such as SGLang.

Both workers receive the prefill worker's bootstrap address and the number of a room, in which they meet.
"""

from __future__ import annotations

import json
import secrets

from kvrouter.net.engine_transfers import SGLANG_TRANSFER
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import TransferParams

_ROOM_BITS = 62


def runs_concurrently(worker: WorkerRegistration | None) -> bool:
    """Returns whether decode workers meet a prefill worker while it computes the prompt."""
    return worker is not None and bool(worker.bootstrap_endpoint)


def draw_room(worker: WorkerRegistration, rank: Rank) -> TransferParams:
    """Returns the parameters of a hand-over by a prefill worker, in a random room.

    The room modulo the number of ranks is the prefill rank, by which SGLang finds it.
    """
    host, _, port = worker.bootstrap_endpoint.rpartition(":")
    ranks = max(1, len(worker.ranks))
    room = secrets.randbits(_ROOM_BITS) // ranks * ranks + rank.dp_rank
    payload = {"bootstrap_host": host.strip("[]"), "bootstrap_port": int(port), "bootstrap_room": room}
    return TransferParams(format=SGLANG_TRANSFER, payload=json.dumps(payload).encode())
