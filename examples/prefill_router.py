"""Chooses prefill workers for a caller that runs the stages itself, such as SGLang's router.

It asks a running Frontend (`kvrouter up --prefill 2 --decode 2`) for the prefill worker of a prompt, books the prompt
there, and reports its end. The caller sends the prompt to that worker, and its decode worker is chosen elsewhere.
"""

import sys
import uuid

import grpc
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.frontend_pb2 import BestWorkerRequest, PrefillCompleteRequest, ReleaseRequest
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub
from kvrouter.v1.indexer_pb2 import TokenIds
from kvrouter.v1.scheduler_pb2 import RoutingRequest

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
prompt = range(1000)
with grpc.insecure_channel(target) as channel:
    frontend = FrontendServiceStub(channel)
    booking = BookingKey(request_id=uuid.uuid4().hex, stage=Stage.STAGE_PREFILL)
    request = RoutingRequest(model="mock-model", token_ids=TokenIds(ids=prompt))
    # The lease frees the booking if this process dies.
    chosen = frontend.BestWorker(
        BestWorkerRequest(request=request, booking=booking, lease_ms=60_000), timeout=10
    ).selection
    print(f"prefill worker {chosen.rank.worker_id} at {chosen.endpoint}, overlap {chosen.overlap_blocks} blocks")
    try:
        # Send the prompt to the worker here, and to the decode worker at the same time.
        known = frontend.PrefillComplete(PrefillCompleteRequest(booking=booking), timeout=10).known
        print(f"prefill complete, booking known: {known}")
    finally:
        frontend.Release(ReleaseRequest(booking=booking), timeout=10)
