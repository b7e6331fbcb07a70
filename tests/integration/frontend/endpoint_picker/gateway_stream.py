"""A gateway's side of external processing, for tests: one stream for each HTTP request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

MODES = ProtocolConfiguration(
    request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED, response_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED
)


def headers(**fields: str) -> HeaderMap:
    return HeaderMap(
        headers=[HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()) for name, value in fields.items()]
    )


def metadata(namespace: str, key: str, value: Any) -> Metadata:
    built = Metadata()
    built.filter_metadata[namespace].update({key: value})
    return built


class GatewayStream:
    """One HTTP request as the gateway sees it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = ExternalProcessorStub(channel)
        self.call = stub.Process()

    async def send(self, **fields: Any) -> None:
        await self.call.write(ProcessingRequest(**fields))

    async def receive(self) -> ProcessingResponse:
        message: ProcessingResponse = await self.call.read()
        return message

    async def request(
        self,
        body: bytes | dict[str, Any],
        *,
        pieces: int = 1,
        allowed: Iterable[str] | None = None,
        sent: Mapping[str, str] = MappingProxyType({}),
        modes: ProtocolConfiguration = MODES,
    ) -> None:
        """Sends the headers, and the body in pieces."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        hint = Metadata()
        if allowed is not None:
            hint = metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", list(allowed))
        await self.send(
            request_headers=HttpHeaders(headers=headers(x_request_id="r-1", **sent)),
            protocol_config=modes,
            metadata_context=hint,
        )
        size = -(-len(encoded) // pieces)
        for start in range(0, len(encoded), size):
            piece = encoded[start : start + size]
            await self.send(request_body=HttpBody(body=piece, end_of_stream=start + size >= len(encoded)))

    async def routed(self, body: bytes | dict[str, Any], **how: Any) -> tuple[list[str], bytes]:
        """Sends a request; the endpoints that it is routed to, and the body that is passed on."""
        await self.request(body, **how)
        answer = await self.receive()
        assert answer.HasField("request_headers"), answer
        chosen = self.set_headers(answer)["x-gateway-destination-endpoint"]
        assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == chosen
        passed = bytearray()
        while True:
            piece = (await self.receive()).request_body.response.body_mutation.streamed_response
            passed += piece.body
            if piece.end_of_stream:
                return chosen.split(","), bytes(passed)

    async def refused(self, body: bytes | dict[str, Any], **how: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Sends a request; the status, headers and error that it is refused with."""
        await self.request(body, **how)
        refusal = (await self.receive()).immediate_response
        mutated = {each.header.key: each.header.raw_value.decode() for each in refusal.headers.set_headers}
        return refusal.status.code, mutated, json.loads(refusal.body)["error"]

    async def respond(self, *pieces: bytes, served: str = "", content_type: str = "text/event-stream") -> bytes:
        """Sends a response, and returns it as it is passed on."""
        reported = metadata("envoy.lb", "x-gateway-destination-endpoint-served", served) if served else Metadata()
        await self.send(
            response_headers=HttpHeaders(headers=headers(content_type=content_type)), metadata_context=reported
        )
        assert (await self.receive()).HasField("response_headers")
        passed = b""
        for piece in pieces:
            await self.send(response_body=HttpBody(body=piece))
            passed += (await self.receive()).response_body.response.body_mutation.streamed_response.body
        return passed

    async def end(self) -> None:
        """Ends the response with trailers, and the stream."""
        await self.send(response_trailers=HttpTrailers())
        assert (await self.receive()).HasField("response_trailers")
        await self.call.done_writing()

    @staticmethod
    def set_headers(answer: ProcessingResponse) -> dict[str, str]:
        part = answer.request_headers if answer.HasField("request_headers") else answer.response_headers
        return {each.header.key: each.header.raw_value.decode() for each in part.response.header_mutation.set_headers}
