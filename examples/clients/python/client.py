"""Calls a Frontend over gRPC: a stream, a cancellation, the manual life cycle, errors, and a reconnection.

Usage: client.py TARGET MODEL. It prints one line for each step. For the last step restart the Frontend.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo as StandardErrorInfo, RetryInfo
from grpc_status import rpc_status
from kvrouter.v1.common_pb2 import BookingKey, RoutingConstraints, RoutingOverrides, RoutingRequest, TokenIds
from kvrouter.v1.errors_pb2 import ErrorInfo
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceGenerateRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
)
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub
from kvrouter.v1.worker_pb2 import StopConditions

PROMPT = list(range(1, 257))
TEXT = "Once upon a time"
ENDLESS = 50_000
CALL_SECONDS = 30
RETRY_SECONDS = 60

Detail = TypeVar("Detail", bound=Message)
Answer = TypeVar("Answer")


def detail(error: grpc.RpcError, of: type[Detail]) -> Detail | None:
    """Returns the detail of a type from `grpc-status-details-bin`; None if the error has none."""
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        found = of()
        if packed.Unpack(found):
            return found
    return None


def retry_seconds(error: grpc.RpcError) -> float | None:
    """Returns the time to wait before a retry; None if a retry cannot succeed."""
    if retry := detail(error, RetryInfo):
        return retry.retry_delay.ToTimedelta().total_seconds()
    # The library itself reports a lost connection, without details. The retry waits until it is connected again.
    return 0.0 if error.code() is grpc.StatusCode.UNAVAILABLE else None


def retrying(call: Callable[[], Answer]) -> Answer:
    """Returns the answer of a call, which is repeated while the server says that a retry may succeed."""
    give_up = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            pause = retry_seconds(error)
            if pause is None or time.monotonic() + pause > give_up:
                raise
            time.sleep(pause)


def failed(call: Callable[[], object]) -> grpc.RpcError:
    """Returns the error of a call that is expected to fail."""
    try:
        call()
    except grpc.RpcError as error:
        return error
    raise SystemExit("expected the call to fail, but it succeeded")


class Client:
    """The steps, over one channel."""

    def __init__(self, stub: FrontendServiceStub, model: str) -> None:
        self.stub = stub
        self.model = model

    def request(self, max_tokens: int) -> FrontendServiceGenerateRequest:
        return FrontendServiceGenerateRequest(
            model=self.model,
            token_ids=TokenIds(ids=PROMPT),
            stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )

    def generate(self, request: FrontendServiceGenerateRequest) -> tuple[int, int]:
        """Runs a request to its end. Returns the worker and the number of tokens."""
        worker = tokens = 0
        for piece in self.stub.Generate(request, timeout=CALL_SECONDS, wait_for_ready=True):
            if piece.HasField("routing"):
                worker = piece.routing.rank.worker_id
            tokens += len(piece.output.token_ids)
        return worker, tokens

    def stream(self) -> None:
        worker, tokens = retrying(lambda: self.generate(self.request(16)))
        print(f"stream: worker {worker}, {tokens} tokens", flush=True)

    def text(self) -> None:
        """Sends a text instead of token ids, and gets the output as text too."""
        request = self.request(16)
        request.prompt_text, request.return_text = TEXT, True
        pieces = retrying(lambda: list(self.stub.Generate(request, timeout=CALL_SECONDS, wait_for_ready=True)))
        characters = sum(len(piece.output.text) for piece in pieces)
        tokens = sum(len(piece.output.token_ids) for piece in pieces)
        print(f"text: {characters} characters, {tokens} tokens", flush=True)

    def cancel(self) -> None:
        call = self.stub.Generate(self.request(ENDLESS))
        pieces = sum(1 for _ in itertools.islice(call, 3))
        call.cancel()
        error = failed(lambda: list(call))
        print(f"cancel: after {pieces} pieces, {error.code().name}", flush=True)

    def manual_life_cycle(self) -> None:
        """Books a worker as a client that dispatches by itself does. Shows meanwhile what a busy worker answers."""
        booking = BookingKey(request_id=uuid.uuid4().hex)
        routing = RoutingRequest(model=self.model, token_ids=TokenIds(ids=PROMPT), max_output_tokens=16)
        chosen = retrying(
            lambda: self.stub.SelectWorker(
                FrontendServiceSelectWorkerRequest(request=routing, booking=booking), timeout=CALL_SECONDS
            )
        ).selection
        try:
            print(f"book: worker {chosen.rank.worker_id} at {chosen.endpoint}", flush=True)
            # Here such a client sends its request to the worker. The first token has arrived:
            known = self.stub.MarkPrefillComplete(
                FrontendServiceMarkPrefillCompleteRequest(booking=booking), timeout=CALL_SECONDS
            ).known
            print(f"prefill complete: known {str(known).lower()}", flush=True)
            busy = self.request(16)
            # Only the booked worker may serve it, and only if that worker has no active block.
            busy.constraints.CopyFrom(RoutingConstraints(worker_id=chosen.rank.worker_id))
            busy.overrides.CopyFrom(RoutingOverrides(active_decode_blocks_threshold=0.0))
            self.say_failure("all busy", failed(lambda: self.generate(busy)))
        finally:
            known = self.stub.Free(FrontendServiceFreeRequest(booking=booking), timeout=CALL_SECONDS).known
        print(f"free: known {str(known).lower()}", flush=True)
        worker, tokens = retrying(lambda: self.generate(busy))
        print(f"retry: worker {worker}, {tokens} tokens", flush=True)

    def unknown_model(self) -> None:
        request = self.request(1)
        request.model = "no-such-model"
        self.say_failure("unknown model", failed(lambda: self.generate(request)))

    def reconnect(self) -> None:
        """Loses the Frontend during a stream, and sends the request again."""
        call = self.stub.Generate(self.request(ENDLESS))
        next(call)
        print("reconnect: restart the Frontend now", flush=True)
        error = failed(lambda: [None for _ in call])
        if retry_seconds(error) is None:
            raise error
        worker, tokens = retrying(lambda: self.generate(self.request(16)))
        print(f"reconnected: after {error.code().name}, worker {worker}, {tokens} tokens", flush=True)

    def say_failure(self, step: str, error: grpc.RpcError) -> None:
        info = detail(error, ErrorInfo) or ErrorInfo()
        standard = detail(error, StandardErrorInfo) or StandardErrorInfo()
        retry = detail(error, RetryInfo)
        pause = f"retry in {retry.retry_delay.ToMilliseconds()} ms" if retry else "no retry"
        values = ", ".join(info.known_values) or "none"
        print(f"{step}: {error.code().name}, {standard.reason}, {pause}, known values: {values}", flush=True)


def main(target: str, model: str) -> None:
    with grpc.insecure_channel(target) as channel:
        client = Client(FrontendServiceStub(channel), model)
        client.stream()
        client.text()
        client.cancel()
        client.manual_life_cycle()
        client.unknown_model()
        client.reconnect()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: client.py TARGET MODEL, such as client.py 127.0.0.1:8001 mock-model")
    main(*sys.argv[1:])
