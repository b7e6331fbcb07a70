"""Options of services: flags, then the environment, then a file, then defaults; typed, checked at start, and frozen.

A field ``overlap_score_weight`` is the flag ``--overlap-score-weight``, the variable ``KVROUTER_OVERLAP_SCORE_WEIGHT``
and the key ``overlap_score_weight`` of the file. Further names that it goes by are its ``validation_alias``
(``AliasChoices``), and further variables its ``json_schema_extra={"env": [...]}``. A switch also has ``--no-...``.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import uuid
from typing import Annotated, ClassVar, Literal

from kvrouter.runtime.settings_sources import SettingsError, load, load_all
from kvrouter.v1.names import InvalidName, check_name
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["Address", "Name", "OptionalAddress", "ServiceSettings", "SettingsError", "load", "load_all"]


def _checked_name(text: str) -> str:
    try:
        return check_name(text)
    except InvalidName as error:
        raise ValueError(str(error)) from None


def _checked_address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or ("[" in host) != (":" in bare):
        raise ValueError("write host:port, an IPv6 host in brackets")
    if "[" in host:
        ipaddress.IPv6Address(bare)
    return text


def _checked_optional_address(text: str) -> str:
    return _checked_address(text) if text else text


Name = Annotated[str, AfterValidator(_checked_name)]
"""1 to 64 letters, digits, ``-`` or ``_``."""
Address = Annotated[str, AfterValidator(_checked_address)]
"""host:port."""
OptionalAddress = Annotated[str, AfterValidator(_checked_optional_address)]
"""host:port, or empty."""


def _made_up_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40] or "host"
    return f"{host}-{uuid.uuid4().hex[:8]}"


class ServiceSettings(BaseModel):
    """Options that every service has."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    section: ClassVar[str] = ""
    """Table of the file that is this service's own; without one, the class's name before ``Settings``."""

    namespace: Name = Field(default="kvrouter", description="Namespace; services and workers of one see each other.")
    etcd: str = Field(
        default="127.0.0.1:2379",
        description="Endpoints of etcd, host:port, separated by commas.",
        json_schema_extra={"env": ["ETCD_ENDPOINTS"]},
    )
    nats: str = Field(
        default="nats://127.0.0.1:4222",
        description="URLs of NATS, separated by commas.",
        json_schema_extra={"env": ["NATS_SERVER"]},
    )
    bind: Address = Field(default="127.0.0.1:0", description="Address of the gRPC server, host:port; 0 is a free port.")
    advertise: str = Field(
        default="", description="Host, or host:port, that others reach the gRPC server by; empty for where it listens."
    )
    http_bind: OptionalAddress = Field(
        default="127.0.0.1:0",
        description="Address of /metrics, /health and /ready, host:port; 0 is a free port, empty is none.",
    )
    instance_id: Name = Field(default_factory=_made_up_id, description="Id of this process, unique among live ones.")
    lease_seconds: int = Field(
        default=10, ge=2, le=3600, description="Time after which a process that died is taken to be gone, seconds."
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="Time that calls under way get to finish on SIGTERM, seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    log_format: Literal["json", "console"] = Field(default="json", description="Form of log lines.")

    @classmethod
    def table(cls) -> str:
        """Name of the table of the file that holds this service's own options."""
        return cls.section or cls.__name__.removesuffix("Settings").lower()
