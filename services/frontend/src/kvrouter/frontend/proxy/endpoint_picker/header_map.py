"""Headers in messages of the gateway."""

from __future__ import annotations

from envoy.config.core.v3.base_pb2 import HeaderMap


def header_list(headers: HeaderMap) -> list[tuple[str, str]]:
    """Returns names in lower case and values, with repeated headers."""
    return [
        (each.key.lower(), each.value or each.raw_value.decode("utf-8", "surrogateescape")) for each in headers.headers
    ]


def header_values(headers: HeaderMap) -> dict[str, str]:
    """Returns values by name in lower case; of a repeated header the last one."""
    return dict(header_list(headers))
