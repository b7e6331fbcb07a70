"""Headers and metadata in messages of the gateway.

Metadata of the endpoint picker protocol says which endpoints may serve, which should, and which one did.
"""

from __future__ import annotations

from collections.abc import Sequence

from envoy.config.core.v3.base_pb2 import HeaderMap, Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.struct_pb2 import Struct, Value

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key of the chosen endpoints: the first one serves, the others are fallbacks."""
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_FILTER = "envoy.filters.http.ext_proc"
_CODE_DETAILS = "response.code_details"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"


def allowed_endpoints(metadata: Metadata) -> frozenset[str] | None:
    """Returns the endpoints the gateway allows for a request, as host:port; None if it allows all."""
    namespace = metadata.filter_metadata.get(_SUBSET_NAMESPACE)
    if namespace is None or _SUBSET not in namespace.fields:
        return None
    return frozenset(_texts(namespace.fields[_SUBSET]))


def served_endpoint(metadata: Metadata) -> str:
    """Returns the endpoint that served a request, host:port; empty if the gateway does not report it."""
    namespace = metadata.filter_metadata.get(_LB_NAMESPACE)
    if namespace is None or _SERVED not in namespace.fields:
        return ""
    return str(namespace.fields[_SERVED].string_value)


def code_details(message: ProcessingRequest) -> str:
    """Returns who made a response, and why, as Envoy says it; empty if the gateway does not send that attribute."""
    attributes = message.attributes.get(_FILTER)
    if attributes is None or _CODE_DETAILS not in attributes.fields:
        return ""
    return str(attributes.fields[_CODE_DETAILS].string_value)


def destination(endpoints: Sequence[str]) -> Struct:
    """Returns the dynamic metadata naming the chosen endpoints."""
    chosen = Struct()
    chosen.fields[_LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = ",".join(endpoints)
    return chosen


def _texts(value: Value) -> list[str]:
    """Returns the endpoints of a list, or of a text with commas: gateways send either."""
    if value.HasField("list_value"):
        return [text for item in value.list_value.values for text in _texts(item)]
    return [text.strip() for text in value.string_value.split(",") if text.strip()]


def header_list(headers: HeaderMap) -> list[tuple[str, str]]:
    """Returns names in lower case and values, with repeated headers."""
    return [
        (each.key.lower(), each.value or each.raw_value.decode("utf-8", "surrogateescape")) for each in headers.headers
    ]


def header_values(headers: HeaderMap) -> dict[str, str]:
    """Returns values by name in lower case; of a repeated header the last one."""
    return dict(header_list(headers))
