"""Sends one request to a running Frontend (`make up`) and prints the worker that served it, and its output."""

from __future__ import annotations

import argparse

import grpc
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub
from kvrouter.v1.worker_pb2 import StopConditions

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", nargs="?", default="127.0.0.1:8001", help="gRPC address of the Frontend (%(default)s)")
with grpc.insecure_channel(parser.parse_args().target) as channel:
    request = FrontendServiceGenerateRequest(
        model="mock-model", token_ids=TokenIds(ids=range(1000)), stop_conditions=StopConditions(max_tokens=8)
    )
    for response in FrontendServiceStub(channel).Generate(request, timeout=30):
        if response.HasField("routing"):
            print(
                f"worker {response.routing.rank.worker_id}, overlap {response.routing.predicted_overlap_blocks} blocks"
            )
        if response.output.HasField("cached_tokens"):
            print(f"{response.output.cached_tokens} of 1000 prompt tokens were in its cache")
        print(list(response.output.token_ids))
