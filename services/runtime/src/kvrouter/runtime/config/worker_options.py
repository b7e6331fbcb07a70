"""Options that every kind of worker has, and what their values are called in the contract."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from kvrouter.v1.common_pb2 import Role, Transport

RoleOption: TypeAlias = Literal["both", "prefill", "decode"]
TransportOption: TypeAlias = Literal["default", "durable", "core-nats"]

ROLES: Mapping[RoleOption, Role] = MappingProxyType(
    {"both": Role.ROLE_BOTH, "prefill": Role.ROLE_PREFILL, "decode": Role.ROLE_DECODE}
)
TRANSPORTS: Mapping[TransportOption, Transport] = MappingProxyType(
    {
        "default": Transport.TRANSPORT_UNSPECIFIED,
        "durable": Transport.TRANSPORT_DURABLE,
        "core-nats": Transport.TRANSPORT_CORE_NATS,
    }
)
