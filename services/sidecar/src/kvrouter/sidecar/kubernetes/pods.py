"""What a pod says of the engines in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.sidecar.kubernetes.selection import JsonObject

_ENDED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that a source names."""

    url: str
    """URL of its HTTP API, without a slash at its end; the component that it joins may precede it (COMPONENT=URL)."""
    incarnation: str = ""
    """Changes with each restart of the engine; empty if the source does not know."""
    is_ready: bool = True
    """Whether the source wants it to get requests."""


def engines_of(pod: JsonObject, ports: Sequence[int]) -> tuple[FoundEngine, ...]:
    """Returns the engines of a pod, one for each port.

    A pod that is being deleted, has ended, or has no address yet has none. The incarnation counts the restarts of the
    container that declares the port; of all containers, if none does.
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    address = status.get("podIP", "")
    if metadata.get("deletionTimestamp") or status.get("phase") in _ENDED or not address:
        return ()
    host = f"[{address}]" if ":" in address else address
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    is_ready = conditions.get("Ready") == "True"
    return tuple(
        FoundEngine(f"http://{host}:{port}", f"{metadata['uid']}/{_restarts(pod, port)}", is_ready) for port in ports
    )


def _restarts(pod: JsonObject, port: int) -> int:
    counts = {each["name"]: int(each["restartCount"]) for each in pod["status"].get("containerStatuses", ())}
    for container in pod.get("spec", {}).get("containers", ()):
        if any(each.get("containerPort") == port for each in container.get("ports", ())):
            return counts.get(container["name"], 0)
    return sum(counts.values())
