"""Chooses workers for a router that runs both stages itself, such as SGLang's, with nothing but the generated stubs.

    python examples/prefill_router.py [TARGET] [STAGE...]

It asks a running Frontend (`kvrouter up --prefill 2 --decode 2`) for a decode worker and a prefill worker of one
prompt, books the prompt at both, and reports the first token of each. With `prefill` as the only stage, the decode
worker is chosen elsewhere, and a fleet of prefill workers is enough.
"""

from __future__ import annotations

import sys
import uuid
from contextlib import ExitStack

import grpc
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, Stage, TokenIds
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
)
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub

LEASE_MS = 60_000
"""If this process dies, its bookings are freed after that time."""

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
names = sys.argv[2:] or ["decode", "prefill"]
request = RoutingRequest(model="mock-model", token_ids=TokenIds(ids=range(1000)))
request_id = uuid.uuid4().hex

with grpc.insecure_channel(target) as channel, ExitStack() as bookings:
    frontend = FrontendServiceStub(channel)
    booked = []
    for name in names:
        booking = BookingKey(request_id=request_id, stage=Stage.Value(f"STAGE_{name.upper()}"))
        chosen = frontend.SelectWorker(
            FrontendServiceSelectWorkerRequest(request=request, booking=booking, lease_ms=LEASE_MS), timeout=10
        ).selection
        bookings.callback(frontend.Free, FrontendServiceFreeRequest(booking=booking), timeout=10)
        booked.append(booking)
        print(f"{name} worker {chosen.rank.worker_id} at {chosen.endpoint}, overlap {chosen.overlap_blocks} blocks")

    # Send the request to both workers here: at the same time, or to the decode worker with what the prefill returned.
    for booking in reversed(booked):
        known = frontend.MarkPrefillComplete(
            FrontendServiceMarkPrefillCompleteRequest(booking=booking), timeout=10
        ).known
        print(f"{Stage.Name(booking.stage)}: first token, booking known: {known}")
