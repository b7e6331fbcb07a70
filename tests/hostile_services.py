"""An Indexer, a Scheduler and a worker that speak garbage, of every layer of the protocol. As a program.

``python -m tests.hostile_services ETCD NAMESPACE SEED`` registers them for the model ``HOSTILE_MODEL`` and serves until
it is killed. It registers each at a port that speaks HTTP/2 by hand and at one of an ordinary gRPC server, in turns.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.net.etcd import EtcdAccess, connect
from kvrouter.v1 import calls_pb2, indexer_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.calls_pb2 import (
    CallFailure,
    CallResponse,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.common_pb2 import Component, Role, Transport
from kvrouter.v1.names import ComponentName, namespace_prefix
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, ServiceRegistration, WorkerRegistration

from .unit.net.calls.scripted_server import Accepted
from .unit.net.fuzz.http2_scripts import corpus, cut, random_script

HOSTILE_MODEL = "hostile-model"
COMPONENT = "hostile"
WORKER_ID = 666
SERVICES: dict[str, ServiceDescriptor] = {
    "indexer": indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
}
_TURN_SECONDS = 3.0
_MAX_DEPTH = 4
_STREAMED = 20_000
"""Messages of a stream that never ends by itself."""


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 8, 32, 300, 70_000]))


def absurd(rng: random.Random, field: FieldDescriptor, depth: int) -> Any:
    """Returns a value that the type of a field permits, and nobody sends."""
    kind = FieldDescriptor
    match field.cpp_type:
        case kind.CPPTYPE_MESSAGE:
            return None
        case kind.CPPTYPE_INT32:
            return rng.choice([0, -1, 1, (1 << 31) - 1, -(1 << 31)])
        case kind.CPPTYPE_ENUM:
            return rng.choice([0, 1, 2, 99, -1])
        case kind.CPPTYPE_INT64:
            return rng.choice([0, -1, 1, (1 << 63) - 1, -(1 << 63)])
        case kind.CPPTYPE_UINT32:
            return rng.choice([0, 1, 2, (1 << 32) - 1, rng.getrandbits(32)])
        case kind.CPPTYPE_UINT64:
            return rng.choice([0, 1, WORKER_ID, (1 << 64) - 1, rng.getrandbits(64)])
        case kind.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case kind.CPPTYPE_FLOAT | kind.CPPTYPE_DOUBLE:
            return rng.choice([0.0, -1.0, 1e308, float("inf"), float("-inf"), float("nan")])
        case _ if field.type == kind.TYPE_BYTES:
            return random_bytes(rng)
    return rng.choice(["", "x", "\x1b[2J\r\n", "é" * 5_000, "workers", HOSTILE_MODEL])


def random_message(rng: random.Random, kind: type[Message], depth: int = 0) -> Message:
    """Returns a message whose fields have absurd values."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() < 0.4 or (field.message_type and depth >= _MAX_DEPTH):
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            continue
        repeated = field.is_repeated
        for _ in range(rng.choice([1, 3, 50]) if repeated else 1):
            if field.message_type:
                value = random_message(rng, GetMessageClass(field.message_type), depth + 1)
                with suppress(ValueError):
                    target = getattr(message, field.name)
                    target.append(value) if repeated else target.CopyFrom(value)
            else:
                value = absurd(rng, field, depth)
                if isinstance(value, float) and field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
                    value = float("inf") if value > 3e38 else value
                if repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
    return message


def random_response(rng: random.Random, service: ServiceDescriptor, name: str) -> bytes:
    """Returns what answers a call: random bytes, or a message of its type or of another one."""
    if rng.random() < 0.2:
        return random_bytes(rng)
    method = service.methods_by_name.get(name) or rng.choice(service.methods)
    if rng.random() < 0.1:
        method = rng.choice(service.methods)
    encoded = random_message(rng, GetMessageClass(method.output_type)).SerializeToString()
    return encoded[: rng.randrange(len(encoded) + 1)] if rng.random() < 0.1 else encoded


# --- by hand ---


class ByHand:
    """A port whose connections get bytes, frames, or messages of call streams."""

    def __init__(self, rng: random.Random, service: ServiceDescriptor) -> None:
        self._rng = rng
        self._service = service
        self._scripts = list(corpus("http2").values())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behaviour = self._rng.choice([self._bytes, self._silence, self._frames, self._frames, self._flood, self._calls])
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(self._rng.uniform(1, 30)):
                await behaviour(Accepted(reader, writer))
        writer.transport.abort()

    async def _bytes(self, accepted: Accepted) -> None:
        while True:
            accepted.send(self._rng.choice([b"HTTP/1.1 200 OK\r\n\r\n", random_bytes(self._rng)]))
            await accepted.flush()
            await asyncio.sleep(0.001)

    async def _silence(self, accepted: Accepted) -> None:
        await accepted.closed()

    async def _frames(self, accepted: Accepted) -> None:
        if self._rng.random() < 0.5:
            await accepted.open()
        while True:
            for part in cut(self._rng, random_script(self._rng, self._scripts)):
                accepted.send(part)
                await accepted.flush()
            await asyncio.sleep(0.001)

    async def _flood(self, accepted: Accepted) -> None:
        """Sends one script again and again, as fast as it can."""
        await accepted.open()
        script = random_script(self._rng, self._scripts)
        while True:
            accepted.send(script)
            await accepted.flush()
            await asyncio.sleep(0)

    async def _calls(self, accepted: Accepted) -> None:
        """Follows the protocol of call streams, and answers with absurd values."""
        names = [method.name for method in self._service.methods]
        hello = CallStreamServerHello(
            version=1,
            methods=[f"{self._service.full_name}/{name}" for name in names],
            max_message_bytes=1 << 20,
            max_calls=1000,
            max_request_bytes=1 << 20,
        )
        await accepted.open(OpenCallStreamResponse(server_hello=hello).SerializeToString())
        while True:
            encoded = await accepted.message()
            request = OpenCallStreamRequest.FromString(encoded)
            for call in request.calls:
                name = names[call.method] if call.method < len(names) else ""
                for _ in range(self._rng.choice([1, 1, 1, 100, 5_000])):
                    accepted.send_message(self._answer(call.number, name))
                    await accepted.flush()
            if request.HasField("ping"):
                pong = self._rng.choice([request.ping, request.ping, request.ping, 0, (1 << 64) - 1])
                accepted.send_message(OpenCallStreamResponse(pong=pong).SerializeToString())

    def _answer(self, number: int, name: str) -> bytes:
        rng = self._rng
        response = random_response(rng, self._service, name)[:200_000]
        kind = rng.choice([0, 0, 1, 1, 1, 2, 3, 4, 99])
        item = CallResponse(number=number if rng.random() < 0.9 else rng.getrandbits(64), response=response)
        item.kind = kind  # type: ignore[assignment]
        if kind == 4:
            item.failure.CopyFrom(random_message(rng, CallFailure))
        return OpenCallStreamResponse(responses=[item]).SerializeToString()


# --- an ordinary server ---


class Ordinary(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Answers every method of gRPC with garbage."""

    def __init__(self, rng: random.Random, service: ServiceDescriptor) -> None:
        self._rng = rng
        self._service = service

    def service(self, details: Any) -> Any:
        name = details.method.rpartition("/")[2]

        async def respond(_requests: Any, context: Any) -> AsyncIterator[bytes]:
            rng = self._rng
            if rng.random() < 0.1:
                context.set_code(rng.choice(list(grpc.StatusCode)))
                context.set_details("é\r\n" * rng.randrange(500))
                context.set_trailing_metadata((("grpc-status-details-bin", random_bytes(rng)[:4_000]),))
                return
            if rng.random() < 0.1:
                await asyncio.sleep(30)
            method = self._service.methods_by_name.get(name)
            streams = method is None or method.server_streaming
            for _ in range(rng.choice([0, 1, 3, _STREAMED]) if streams else 1):
                if details.method.startswith(f"/{calls_pb2.DESCRIPTOR.package}.CallStreamService"):
                    yield random_message(rng, OpenCallStreamResponse).SerializeToString()
                else:
                    yield random_response(rng, self._service, name)
                await asyncio.sleep(0)

        return grpc.stream_stream_rpc_method_handler(respond)


@asynccontextmanager
async def hostile_ports(rng: random.Random, service: ServiceDescriptor) -> AsyncIterator[list[str]]:
    """Yields the two addresses of a hostile service."""
    by_hand = await asyncio.start_server(ByHand(rng, service).serve, "127.0.0.1", 0)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Ordinary(rng, service),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield [f"127.0.0.1:{by_hand.sockets[0].getsockname()[1]}", f"127.0.0.1:{port}"]
    finally:
        by_hand.close()
        await server.stop(0)


async def register(etcd: str, namespace: str, addresses: dict[str, str], turn: int) -> None:
    """Registers the hostile parties, as they would do it."""
    name = ComponentName(namespace, COMPONENT)
    component = Component(namespace=namespace, name=COMPONENT)
    worker = WorkerRegistration(
        worker_id=WORKER_ID,
        model=HOSTILE_MODEL,
        endpoint=addresses["worker"],
        block_size=16,
        role=Role.ROLE_BOTH,
        transport=Transport.TRANSPORT_CORE_NATS,
        hash_scheme="xxh3-1337",
        publishes_events=True,
        serves_call_stream=turn % 4 < 3,
        heartbeat_ms=1000,
        ranks=[RankRegistration(dp_rank=0, incarnation=turn + 1, total_blocks=1000)],
    )
    descriptor = ComponentDescriptor(
        model=HOSTILE_MODEL,
        block_size=16,
        hash_scheme="xxh3-1337",
        default_transport=Transport.TRANSPORT_CORE_NATS,
        role=Role.ROLE_BOTH,
    )
    async with connect(EtcdAccess(etcd)) as client:
        await client.put(name.descriptor_key.encode(), descriptor.SerializeToString())
        await client.put(name.worker_key(WORKER_ID).encode(), worker.SerializeToString())
        for kind in ("indexer", "scheduler"):
            service = ServiceRegistration(endpoint=addresses[kind], components=[component], ready=True)
            key = f"{namespace_prefix(namespace)}services/{kind}/hostile"
            await client.put(key.encode(), service.SerializeToString())


async def main(etcd: str, namespace: str, seed: int) -> None:
    rng = random.Random(seed)
    async with AsyncExitStack() as exits:
        ports = {
            name: await exits.enter_async_context(hostile_ports(rng, service)) for name, service in SERVICES.items()
        }
        for turn in itertools.count():
            chosen = {name: rng.choice(addresses) for name, addresses in ports.items()}
            await register(etcd, namespace, chosen, turn)
            await asyncio.sleep(_TURN_SECONDS)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
