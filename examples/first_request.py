"""Sends one request to a running gateway (`make up`) and prints where it ran and what came out."""

import sys

import grpc
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub
from kvrouter.v1.worker_pb2 import StopConditions

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
with grpc.insecure_channel(target) as channel:
    request = FrontendServiceGenerateRequest(
        model="mock-model", token_ids=range(1000), stop_conditions=StopConditions(max_tokens=8)
    )
    for piece in FrontendServiceStub(channel).Generate(request, timeout=30):
        if piece.HasField("routing"):
            print("worker", piece.routing.rank.worker_id, "holds", piece.routing.predicted_overlap_blocks, "blocks")
        if piece.output.HasField("cached_tokens"):
            print(piece.output.cached_tokens, "of 1000 prompt tokens came out of its cache")
        print(list(piece.output.token_ids))
