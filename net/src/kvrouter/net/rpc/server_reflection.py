"""gRPC server reflection, in both versions that clients ask for.

grpcio-reflection serves v1alpha only. The messages of v1 have the same encoding, so that one servicer answers both.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_SERVICE = "grpc.reflection.v1.ServerReflection"
"""Full name of version 1, of which grpcio-reflection has no descriptor: it is served but not listed."""


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serves the descriptors of a server's services to tools such as grpcurl and buf.

    Args:
        server: The server, not started yet.
        services: Full names of its services.
    """
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": info})
    server.add_generic_rpc_handlers((handler,))
