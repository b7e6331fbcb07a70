"""Which pods have engines, as an option or an InferencePool of the Gateway API says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

JsonObject: TypeAlias = Mapping[str, Any]

POOL_GROUP, POOL_VERSION, POOL_PLURAL = "inference.networking.k8s.io", "v1", "inferencepools"
_DEFAULT_PORT = 8000
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_POOL = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PodSelection:
    """Pods of one namespace, and the ports of the engines in each of them."""

    labels: str
    """Label selector, as the API server reads it."""
    ports: tuple[int, ...] = (_DEFAULT_PORT,)
    """Ports of the HTTP APIs. Each is an engine."""
    namespace: str = ""
    """Empty for the namespace of this process."""


@dataclass(frozen=True, slots=True)
class PoolName:
    """Name of an InferencePool."""

    name: str
    namespace: str = ""
    """Empty for the namespace of this process."""


def read_selection(text: str) -> PodSelection:
    """Returns the pods that an option names: ``[NAMESPACE:]LABELS[:PORT]``.

    Raises:
        ValueError: it has another form.
    """
    parts = text.split(":")
    port = _port(int(parts.pop())) if len(parts) > 1 and parts[-1].isdecimal() else _DEFAULT_PORT
    labels = parts.pop().strip()
    namespace = _checked(parts.pop(), _NAMESPACE) if parts else ""
    if parts or not labels:
        raise ValueError(f"expected [NAMESPACE:]LABELS[:PORT], such as app=vllm:8000, received {text!r}")
    return PodSelection(labels, (port,), namespace)


def read_pool_name(text: str) -> PoolName:
    """Returns the pool that an option names: ``[NAMESPACE/]NAME``.

    Raises:
        ValueError: it has another form.
    """
    namespace, slash, name = text.rpartition("/")
    return PoolName(_checked(name, _POOL), _checked(namespace, _NAMESPACE) if slash else "")


def selection_of_pool(pool: JsonObject) -> PodSelection:
    """Returns the pods of an InferencePool, version 1. Its pods are in its own namespace.

    Raises:
        ValueError: a part of its specification is missing, or cannot be served.
    """
    try:
        spec = pool["spec"]
        labels = ",".join(f"{key}={value}" for key, value in sorted(spec["selector"]["matchLabels"].items()))
        ports = tuple(_port(int(each["number"])) for each in spec["targetPorts"])
        namespace = str(pool["metadata"]["namespace"])
        protocol = spec.get("appProtocol", "http")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected selector.matchLabels and targetPorts in the spec; missing or malformed: {error}"
        ) from None
    if not labels or not ports:
        raise ValueError("expected at least one label and one port")
    if protocol != "http":
        raise ValueError(f"appProtocol: expected http, which engines speak, received {protocol!r}")
    return PodSelection(labels, ports, namespace)


def _checked(name: str, form: re.Pattern[str]) -> str:
    if form.fullmatch(name) is None:
        raise ValueError(f"expected a name of Kubernetes, received {name!r}")
    return name


def _port(number: int) -> int:
    if not 0 < number < 65_536:
        raise ValueError(f"expected a port up to 65535, received {number}")
    return number
