"""Configuration of the sockets for KV events, with the keys of ``--kv-events-config`` of vLLM and SGLang."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class KvEventsConfig(BaseModel):
    """Where and how the ranks publish. Each rank adds its number to the ports; port 0 takes a free one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = Field(default=10_000, ge=1)
    hwm: int = Field(default=100_000, ge=0)
    max_queue_size: int = Field(default=100_000, ge=0)
    topic: str = ""
    bind: bool | None = None
    """Only of SGLang: whether the ranks listen on the endpoint; None to listen on wildcard addresses only."""
    format: Literal["default", "dynamo"] = "default"
    """Only of SGLang: the simulation has one format."""

    @property
    def publishes(self) -> bool:
        """Whether events are published. SGLang has no ``enable_kv_cache_events``, so either key enables them."""
        return self.publisher == "zmq" or (self.publisher is None and self.enable_kv_cache_events)

    @property
    def connects(self) -> bool:
        """Whether the ranks connect to the endpoint, because it is an address of somebody else."""
        if self.bind is not None:
            return not self.bind
        return not any(wildcard in self.endpoint for wildcard in ("*", "::", "0.0.0.0"))  # noqa: S104

    def events_endpoint(self, dp_rank: int, host: str) -> str:
        """Returns the address on which a rank publishes or to which it connects.

        Args:
            dp_rank: The rank.
            host: Host of the server, on which a free port is taken.
        """
        return of_rank(self.endpoint, dp_rank, host)

    def replays_endpoint(self, dp_rank: int, host: str) -> str:
        """Returns the address on which a rank answers replay requests; empty for none."""
        return of_rank(self.replay_endpoint, dp_rank, host) if self.replay_endpoint else ""


def of_rank(endpoint: str, dp_rank: int, host: str) -> str:
    """Returns the endpoint of a rank, from that of rank 0.

    Args:
        endpoint: Endpoint of rank 0. ``tcp://*:0`` is a free port of ``host``.
        dp_rank: The rank.
        host: Host of the server.
    """
    if endpoint == "tcp://*:0":
        return f"tcp://{host}:*"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + dp_rank}" if port.isdigit() and int(port) else endpoint
