"""Everything that a worker can be told, as one frozen value that checks itself."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvrouter.net.etcd import InvalidEndpoint, parse_endpoints
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.v1.common_pb2 import Component, CopyCounting, Role, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration

HASH_SCHEME = "xxh3-1337"
"""How local hashes are made; the only scheme."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker: its place in the system, what it can do, and how it reports.

    Raises:
        InvalidConfig: a value is out of range.
    """

    component: ComponentName
    """Pool of like workers that it joins."""

    model: str
    """Name of the model, as clients ask for it."""

    block_size: int
    """Tokens in a block of the engine's KV cache, 1 or more; the same for all workers of the component."""

    ranks: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """Data parallel ranks: rank → KV blocks that it has in device memory, 0 if unknown."""

    worker_id: int = field(default_factory=lambda: secrets.randbits(53) | 1)
    """Identity in the component, u64. Drawn at random (53 bits, so that JSON holds it) unless given; a worker that
    restarts under its old id takes the place of its former self."""

    etcd: str = "127.0.0.1:2379"
    """``host:port`` of etcd, several separated by commas."""

    nats: str = "nats://127.0.0.1:4222"
    """URL of NATS, several separated by commas."""

    bind: str = "127.0.0.1:0"
    """``host:port`` on which the WorkerService listens; port 0 takes a free one."""

    advertise: str = ""
    """Address at which others reach it: ``host:port``, or a host alone for the port that is listened on; empty for the
    host of ``bind``, which then must not be a wildcard."""

    transport: Transport = Transport.TRANSPORT_UNSPECIFIED
    """How events travel; unspecified takes the component's default, which is durable unless its first worker said
    otherwise."""

    copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED
    """Whether stores and removals speak of physical copies (vLLM) or of a set (SGLang). Wrong, blocks vanish early or
    stay for ever."""

    role: Role = Role.ROLE_BOTH
    """Prefill, decode, or both."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for routing constraints."""

    lora_names: tuple[str, ...] = ()
    """Adapters that it serves."""

    publishes_events: bool = True
    """Whether it reports its cache."""

    max_batched_tokens: int = 0
    """Most prompt tokens that it computes in one step; 0 if unknown."""

    max_sequences: int = 0
    """Most requests that it runs at once; 0 if unknown."""

    max_model_len: int = 0
    """Most tokens in prompt and output together; 0 for no limit. The same for all workers of the component."""

    heartbeat_seconds: float = 5.0
    """Time without events after which cursor and digest are told all the same, above 0."""

    load_report_seconds: float = 1.0
    """Time between load reports; 0 for none."""

    lease_ttl_seconds: int = 10
    """Time after which a worker that died is no candidate any more, 2 or more."""

    buffer_events: int = 200_000
    """Events kept per rank, be it to send or to serve them again, 1 or more. Five minutes of a busy engine."""

    buffer_bytes: int = 32 << 20
    """Bytes of encoded events kept per rank, 512 KiB or more."""

    drain_seconds: float = 30.0
    """Time that requests have to finish when the worker stops, 0 or more; later they are aborted."""

    flush_seconds: float = 5.0
    """Time that events have to be sent when the worker stops, 0 or more."""

    journal_path: Path | None = None
    """Directory in which each rank's state is kept, for a relay: a process of its own beside the engine, that may die
    and start again while the engine lives. None keeps nothing; then each start begins a new incarnation."""

    engine_incarnation: str = ""
    """Names the life of the engine's cache, such as its process id and start time; with ``journal_path`` only. What is
    kept of another life is not used."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_size", 1, 1 << 20),
            ("worker_id", 0, (1 << 64) - 1),
            ("lease_ttl_seconds", 2, 86_400),
            ("buffer_events", 1, 1 << 40),
            ("buffer_bytes", 512 << 10, 1 << 50),
            ("load_report_seconds", 0, 86_400),
            ("drain_seconds", 0, 86_400),
            ("flush_seconds", 0, 86_400),
            ("max_batched_tokens", 0, (1 << 32) - 1),
            ("max_sequences", 0, (1 << 32) - 1),
            ("max_model_len", 0, (1 << 32) - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidConfig(f"{name} is {value}: it must be from {low} to {high}")
        if not 0 < self.heartbeat_seconds <= 86_400:
            raise InvalidConfig(f"heartbeat_seconds is {self.heartbeat_seconds}: it must be above 0, up to 86400")
        if (self.journal_path is None) != (not self.engine_incarnation):
            raise InvalidConfig(
                "journal_path and engine_incarnation go together: a journal belongs to one incarnation of the engine"
            )
        if not self.model:
            raise InvalidConfig("model is empty: name the model as clients ask for it")
        if not self.ranks:
            raise InvalidConfig("ranks is empty: a worker has one rank at least, such as {0: total_blocks}")
        for rank, total_blocks in self.ranks.items():
            if not (0 <= rank < 1 << 32 and 0 <= total_blocks < 1 << 64):
                raise InvalidConfig(f"ranks: rank {rank} with {total_blocks} blocks, both must be 0 or more")
        try:
            parse_endpoints(self.etcd)
        except InvalidEndpoint as error:
            raise InvalidConfig(f"etcd: {error}") from None
        for url in self.nats.split(","):
            if urlsplit(url).scheme not in {"nats", "tls", "ws", "wss"} or not urlsplit(url).hostname:
                raise InvalidConfig(f"nats: {url!r} is no URL such as nats://127.0.0.1:4222")
        host, colon, port = self.bind.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65_535:
            raise InvalidConfig(f"bind: {self.bind!r} is not host:port")
        if not self.advertise and host.strip("[]") in {"0.0.0.0", "::"}:  # noqa: S104
            raise InvalidConfig(f"bind: {self.bind!r} listens everywhere; set advertise to where others reach it")

    def endpoint(self, port: int) -> str:
        """Address at which others reach the WorkerService that listens on ``port``."""
        host = self.advertise or self.bind.rpartition(":")[0]
        if self.advertise.rpartition(":")[2].isdigit() and not self.advertise.endswith("]"):
            return self.advertise
        return f"{host}:{port}"

    def descriptor(self) -> ComponentDescriptor:
        """The component as this worker would found it."""
        return ComponentDescriptor(
            component=Component(namespace=self.component.namespace, name=self.component.name),
            model=self.model,
            block_size=self.block_size,
            hash_scheme=HASH_SCHEME,
            default_transport=self.transport or Transport.TRANSPORT_DURABLE,
            role=self.role or Role.ROLE_BOTH,
            max_model_len=self.max_model_len,
        )

    def registration(
        self, *, endpoint: str, incarnation: int, transport: Transport, registered_unix_ns: int
    ) -> WorkerRegistration:
        """The worker as others see it. All its ranks begin one incarnation."""
        return WorkerRegistration(
            worker_id=self.worker_id,
            component=Component(namespace=self.component.namespace, name=self.component.name),
            model=self.model,
            endpoint=endpoint,
            block_size=self.block_size,
            role=self.role or Role.ROLE_BOTH,
            transport=transport,
            copy_counting=self.copy_counting,
            ranks=[
                RankRegistration(dp_rank=rank, incarnation=incarnation, total_blocks=total_blocks)
                for rank, total_blocks in sorted(self.ranks.items())
            ],
            labels=self.labels,
            lora_names=self.lora_names,
            hash_scheme=HASH_SCHEME,
            publishes_events=self.publishes_events,
            max_batched_tokens=self.max_batched_tokens,
            max_sequences=self.max_sequences,
            max_model_len=self.max_model_len,
            registered_unix_ns=registered_unix_ns,
            heartbeat_ms=max(1, round(self.heartbeat_seconds * 1000)),
        )
