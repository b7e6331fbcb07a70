"""Types of options of several services."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from kvrouter.engines.keys import EngineKeys
from kvrouter.v1.common_pb2 import Role, Transport
from kvrouter.v1.names import InvalidName, check_name
from pydantic import AfterValidator, Field


def _checked_name(text: str) -> str:
    try:
        return check_name(text)
    except InvalidName as error:
        raise ValueError(str(error)) from None


def _checked_address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or ("[" in host) != (":" in bare):
        raise ValueError("expected host:port, with an IPv6 host in brackets")
    if "[" in host:
        ipaddress.IPv6Address(bare)
    return text


def unless_empty(check: Callable[[str], object]) -> AfterValidator:
    """Returns the validator of an option that may be empty; ``check`` raises ValueError for any other text."""

    def checked(text: str) -> str:
        if text:
            check(text)
        return text

    return AfterValidator(checked)


def is_url(text: str) -> bool:
    """Returns whether an address is the URL of an HTTP API."""
    return text.startswith(("http://", "https://"))


def _checked_address_or_url(text: str) -> str:
    if not is_url(text):
        return _checked_address(text)
    parts = urlsplit(text)
    if not parts.hostname or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("expected http://host:port or https://host:port")
    _ = parts.port  # Raises ValueError if it is none.
    return text.rstrip("/").removesuffix("/v1")


def check_socket_endpoint(text: str) -> str:
    """Returns the endpoint of a ZMQ socket.

    Raises:
        ValueError: it is none.
    """
    scheme, found, rest = text.partition("://")
    if found and scheme == "ipc" and rest:
        return text
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
        raise ValueError("expected tcp://host:port or ipc://path")
    return text


Name = Annotated[str, AfterValidator(_checked_name)]
"""1 to 64 letters, digits, ``-`` or ``_``."""
Address = Annotated[str, AfterValidator(_checked_address)]
"""host:port, with an IPv6 host in brackets."""
AddressOrUrl = Annotated[str, AfterValidator(_checked_address_or_url)]
"""host:port of a gRPC service, or URL of an OpenAI API without its /v1."""
OptionalAddress = Annotated[str, unless_empty(_checked_address)]
"""host:port, with an IPv6 host in brackets, or empty."""


def _with_numbers(names: dict[str, str]) -> dict[str, str]:
    for number in names:
        if not number.isdecimal():
            raise ValueError(f"expected number=name, received {number!r} as the number")
    return names


LoraIds = Annotated[dict[str, str], AfterValidator(_with_numbers)]
"""Names of LoRA adapters by number."""


def _checked(path: str) -> str:
    EngineKeys(path)
    return path


EngineKeysFile = Annotated[
    str,
    AfterValidator(_checked),
    Field(
        description="File with the keys that engines demand at their HTTP APIs, lines "
        'COMPONENT = "KEY" of TOML, of mode 0600 or 0640; a change is used at once.'
    ),
]
"""Path of a file that ``EngineKeys`` can read; empty for none."""


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


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file.

    Raises:
        ValueError: the file is unreadable or invalid; the message is one line.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def can_be_written(path: Path) -> bool:
    """Returns whether a file can be written or created. Call it at the start, so no work is lost at the end."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
