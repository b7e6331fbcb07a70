"""Readiness of a process's services, as grpc.health and the HTTP ops server report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvrouter.net.rpc.server import HealthService
from prometheus_client import CollectorRegistry, Gauge


def readiness_gauge(registry: CollectorRegistry) -> Gauge:
    """Returns the gauge of the readiness of each service of a process, with the label `service`."""
    return Gauge(
        "kvrouter_ready", "1 while the service is ready, as probes see it, otherwise 0.", ["service"], registry=registry
    )


class HealthBoard:
    """Readiness by full gRPC service name. The empty name stands for all services together."""

    def __init__(self, service: HealthService | None = None) -> None:
        """``service`` answers grpc.health."""
        self.service = HealthService() if service is None else service
        self._ready: dict[str, bool] = {}
        self._draining = False

    def announce(self, services: Iterable[str]) -> None:
        """Adds services as not ready."""
        for service in services:
            self._ready.setdefault(service, False)
        self._publish()

    def set_ready(self, service: str, ready: bool = True) -> None:
        """Sets the readiness of one service. While draining, it is stored but not published."""
        if self._ready.get(service) == ready:
            return
        self._ready[service] = ready
        self._publish()

    def drain(self) -> None:
        """Reports every service as not ready from now on."""
        self._draining = True
        self._publish()

    @property
    def services(self) -> Mapping[str, bool]:
        """Readiness by service."""
        return {name: ready and not self._draining for name, ready in self._ready.items()}

    def is_ready(self, service: str) -> bool:
        """Returns whether a service is ready."""
        return self._ready.get(service, False) and not self._draining

    @property
    def ready(self) -> bool:
        """Whether there is a service and all are ready."""
        return bool(self._ready) and all(self.services.values())

    def _publish(self) -> None:
        for name, ready in self.services.items():
            self.service.set(name, ready)
        self.service.set("", self.ready)
