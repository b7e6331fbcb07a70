"""The configuration of a worker, validated when it is constructed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrouter.net.etcd import EtcdAccess, InvalidEndpoint
from kvrouter.net.etcd.registry_entries import name_fault
from kvrouter.net.nats.access import InvalidNats, NatsAccess
from kvrouter.net.tls import TlsOptions
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.v1.common_pb2 import Component, CopyCounting, Role, Tier, Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, StorageTier, WorkerRegistration

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

HASH_SCHEME = "xxh3-1337"
"""Identifier of the hash algorithm and seed of local hashes; the only scheme so far."""


_STORAGE = frozenset({Tier.TIER_HOST, Tier.TIER_DISK, Tier.TIER_SHARED})
_INTEGERS = {
    "block_size": (1, 1 << 20),
    "worker_id": (0, (1 << 64) - 1),
    "lease_ttl_seconds": (2, 86_400),
    "buffer_events": (1, 1 << 40),
    "buffer_bytes": (512 << 10, 1 << 50),
    "max_model_len": (0, (1 << 32) - 1),
}
_UNLESS_UNKNOWN = dict.fromkeys(("max_batched_tokens", "max_sequences", "vocabulary_size"), (1, (1 << 32) - 1))
_SECONDS = dict.fromkeys(("load_report_seconds", "drain_seconds", "flush_seconds"), (0, 86_400))
"""Lowest and highest value of each option."""
_TYPES: tuple[tuple[str, Any, str], ...] = (
    ("component", ComponentName, 'ComponentName("kvrouter", "llama") or ComponentName.parse("kvrouter/llama")'),
    ("model", str, '"llama-3-8b"'),
    ("ranks", Mapping, "{0: 16384}, rank → KV blocks"),
    ("labels", Mapping, '{"zone": "a"}'),
    ("lora_names", tuple, '("adapter",)'),
    ("storage_tiers", tuple, "(StorageTier(tier=Tier.TIER_HOST, load_gb_per_second=20),)"),
    ("engine", str, '"vllm"'),
    *((name, str, '"127.0.0.1:9000"') for name in ("bind", "advertise", "engine_incarnation")),
    ("etcd", str | EtcdAccess, '"127.0.0.1:2379"'),
    ("nats", str | NatsAccess, '"nats://127.0.0.1:4222"'),
    *((name, str, '"http://10.0.0.7:8000"') for name in ("openai_endpoint", "bootstrap_endpoint", "tokenizer")),
    *((name, int, "an integer") for name in _INTEGERS),
    *((name, int | None, "an integer, or None if unknown") for name in _UNLESS_UNKNOWN),
    *((name, int | float, "a number of seconds") for name in (*_SECONDS, "heartbeat_seconds", "state_seconds")),
)
"""The type of each setting, with an example."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Configuration of a worker: its identity, its properties, and how it reports.

    Raises:
        InvalidConfig: a value is out of range.
    """

    component: ComponentName
    """Pool of interchangeable workers to join."""

    model: str
    """Name of the model in the clients' requests."""

    block_size: int
    """Tokens per block of the engine's KV cache, at least 1; equal for all workers of the component."""

    ranks: Mapping[int, int | None] = field(default_factory=lambda: {0: None})
    """Data-parallel ranks: rank → KV blocks in its device memory, at least 1; None if unknown."""

    worker_id: int = field(default_factory=lambda: secrets.randbits(53) | 1)
    """Identity in the component, u64. By default a random number of 53 bits, which JSON numbers can represent. A worker
    that restarts with its previous id replaces its previous registration."""

    etcd: str | EtcdAccess = "127.0.0.1:2379"
    """``host:port`` of etcd, several separated by commas; an EtcdAccess for a user or TLS."""

    nats: str | NatsAccess = "nats://127.0.0.1:4222"
    """URL of NATS, several separated by commas; a NatsAccess for an identity or TLS."""

    bind: str = "127.0.0.1:0"
    """``host:port`` on which the WorkerService listens; port 0 chooses a free one."""

    advertise: str = ""
    """Address under which others reach the worker: ``host:port``, or a host alone to use the port of ``bind``. If
    empty, the host of ``bind`` is used, which then must not be a wildcard."""

    tls: TlsOptions | None = None
    """Certificates of the WorkerService; None serves plain text. All processes of a namespace must agree on it."""

    service_token_file: str = ""
    """File with the digest of the token that workers are shown, or with the service token that it is derived from, of
    mode 0600 or 0640. Empty expects none."""

    transport: Transport = Transport.TRANSPORT_UNSPECIFIED
    """Transport of events. Unspecified uses the component's default, which its first worker sets (durable if that
    worker leaves it unspecified too)."""

    copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED
    """Whether events report each physical copy (vLLM; SGLang in its default format) or a set of blocks. With the wrong
    value, blocks disappear from the index too early or never."""

    role: Role = Role.ROLE_BOTH
    """Prefill, decode, or both."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for routing constraints."""

    lora_names: tuple[str, ...] = ()
    """Names of the served LoRA adapters."""

    openai_endpoint: str = ""
    """URL of the engine's own OpenAI API, such as "http://10.0.0.7:8000"; empty if it has none."""

    engine: str = ""
    """Engine behind ``openai_endpoint``: "vllm", "sglang" or "tensorrt-llm"; empty if unknown. Requests of isolated
    tenants are forwarded to known engines only."""

    structured_output: bool = False
    """Whether the engine applies ``sampling_options.structured_output``. Requests with it are refused otherwise."""
    reads_shared_storage: bool = False
    """Whether the engine loads blocks from shared storage that other workers of the component have stored there."""

    storage_tiers: tuple[StorageTier, ...] = ()
    """Tiers of the engine's KV cache below device memory, each at most once, with the bandwidth of loads if it
    is known."""

    bootstrap_endpoint: str = ""
    """Address at which decode workers meet this prefill worker, ``host:port``; empty for none."""

    tokenizer: str = ""
    """Path or name of the model's tokenizer; empty if unknown. If it is a directory on this machine, the worker
    publishes the tokenizer and the chat template for the Frontends."""

    publishes_events: bool = True
    """Whether the worker reports its cache."""

    max_batched_tokens: int | None = None
    """Maximum number of prompt tokens computed in one step, at least 1; None if unknown."""

    max_sequences: int | None = None
    """Maximum number of running requests of each rank, at least 1; None if unknown."""

    max_model_len: int = 0
    """Maximum number of prompt and output tokens together; 0 for no limit. Equal for all workers of the component."""

    vocabulary_size: int | None = None
    """Number of token ids of the model, including those unused by the tokenizer, at least 1; None if unknown: then as
    many as the tokenizer has. Requests with others are refused."""

    heartbeat_seconds: float = 5.0
    """Interval of heartbeats while there are no events, seconds, above 0. A heartbeat has cursor and digest."""

    load_report_seconds: float = 1.0
    """Interval at which the load is read, seconds. Reported if changed, or within 7 s if not. 0 reports none."""

    lease_ttl_seconds: int = 10
    """Time until a dead worker is no longer a candidate, seconds, at least 2."""

    buffer_events: int = 200_000
    """Events stored per rank, both unsent ones and sent ones for resyncs, at least 1. The default lasts five minutes on
    a busy engine."""

    buffer_bytes: int = 32 << 20
    """Bytes of encoded events stored per rank, at least 512 KiB."""

    drain_seconds: float = 30.0
    """Time for running requests to finish when the worker stops, seconds, 0 or more; then they are aborted."""

    flush_seconds: float = 5.0
    """Time for unsent events to be sent when the worker stops, seconds, 0 or more."""

    tracer: Tracer | None = field(default=None, compare=False, repr=False)
    """Tracer of OpenTelemetry for requests whose caller records them; None records none. The worker needs
    the package ``opentelemetry-api`` then."""

    state: Path | None = None
    """Directory of snapshots, one file per rank. For a relay: a process beside the engine, which can die and restart
    while the engine continues. Without it, each start begins a new incarnation."""

    state_seconds: float = 10.0
    """Least interval of the snapshots, seconds, above 0. A killed relay needs the engine's messages since the last."""

    engine_incarnation: str = ""
    """Name of the current lifetime of the engine's cache, such as its process id and start time; only with ``state``.
    The state of another engine incarnation is not used."""

    def __post_init__(self) -> None:
        self._check_types()
        for name, (low, high) in (_INTEGERS | _SECONDS | _UNLESS_UNKNOWN).items():
            value = getattr(self, name)
            if value is None:
                continue
            if not low <= value <= high:
                raise InvalidConfig(f"{name} is {value}: expected {low} to {high}")
        for name, interval in (("heartbeat_seconds", self.heartbeat_seconds), ("state_seconds", self.state_seconds)):
            if not 0 < interval <= 86_400:
                raise InvalidConfig(f"{name} is {interval}: expected above 0 and up to 86400")
        if (self.state is None) != (not self.engine_incarnation):
            raise InvalidConfig(
                "state and engine_incarnation must be set together: a state belongs to one engine incarnation"
            )
        if not self.model:
            raise InvalidConfig("model is empty: set the name of the model that clients send")
        for which, names in (
            ("model", (self.model,)),
            ("lora_names", self.lora_names),
            ("labels", (*self.labels, *self.labels.values())),
        ):
            if fault := next(filter(None, map(name_fault, names)), ""):
                raise InvalidConfig(f"{which}: {fault}")
        if not self.ranks:
            raise InvalidConfig("ranks is empty: expected at least one rank, such as {0: total_blocks}")
        for rank, total_blocks in self.ranks.items():
            if not (isinstance(rank, int) and isinstance(total_blocks, int | None)):
                raise InvalidConfig(f"ranks: expected integers as rank and blocks, received {rank!r}: {total_blocks!r}")
            if not 0 <= rank < 1 << 32:
                raise InvalidConfig(f"ranks: expected ranks of 0 or more, received {rank}")
            if total_blocks is not None and not 1 <= total_blocks < 1 << 63:
                raise InvalidConfig(
                    f"ranks: expected 1 or more blocks, or None if unknown, received {rank}: {total_blocks}"
                )
        self._check_storage_tiers()
        try:
            EtcdAccess.of(self.etcd)
            NatsAccess.of(self.nats)
        except InvalidEndpoint as error:
            raise InvalidConfig(f"etcd: {error}") from None
        except InvalidNats as error:
            raise InvalidConfig(f"nats: {error}") from None
        if self.tls is not None and self.tls.enabled and not self.tls.cert_file:
            raise InvalidConfig("tls: a worker also needs cert_file and key_file")
        if isinstance(self.nats, str) and "://" not in self.nats:
            raise InvalidConfig(f"nats: expected a URL such as nats://127.0.0.1:4222, received {self.nats!r}")
        host, colon, port = self.bind.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65_535:
            raise InvalidConfig(f"bind: expected host:port, received {self.bind!r}")
        if not self.advertise and host.strip("[]") in {"0.0.0.0", "::"}:  # noqa: S104
            raise InvalidConfig(f"bind: {self.bind!r} is a wildcard: set advertise to an address that others can reach")

    def _check_types(self) -> None:
        for name, kind, example in _TYPES:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidConfig(f"{name}: expected {example}, received {value!r:.100}")

    def _check_storage_tiers(self) -> None:
        tiers = [each.tier for each in self.storage_tiers]
        if not _STORAGE.issuperset(tiers) or len(set(tiers)) < len(tiers):
            names = ", ".join(map(Tier.Name, tiers))
            raise InvalidConfig(f"storage_tiers: expected host, disk and shared, each at most once, received {names}")
        for each in self.storage_tiers:
            if "load_gb_per_second" in each and not 0 < (value := each.load_gb_per_second) < math.inf:
                raise InvalidConfig(f"storage_tiers: expected load_gb_per_second above 0 or unset, received {value}")

    def endpoint(self, port: int) -> str:
        """Returns the address under which others reach the WorkerService listening on ``port``."""
        host = self.advertise or self.bind.rpartition(":")[0]
        if self.advertise.rpartition(":")[2].isdigit() and not self.advertise.endswith("]"):
            return self.advertise
        return f"{host}:{port}"

    def descriptor(self) -> ComponentDescriptor:
        """Returns the descriptor to write by the first worker of a component."""
        return ComponentDescriptor(
            component=Component(namespace=self.component.namespace, name=self.component.name),
            model=self.model,
            block_size=self.block_size,
            hash_scheme=HASH_SCHEME,
            default_transport=self.transport or Transport.TRANSPORT_DURABLE,
            role=self.role or Role.ROLE_BOTH,
            max_model_len=self.max_model_len or None,
        )

    def registration(
        self, *, endpoint: str, incarnation: int, transport: Transport, registered_unix_ns: int
    ) -> WorkerRegistration:
        """Returns the worker's registration, with the same incarnation for all ranks."""
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
            max_model_len=self.max_model_len or None,
            vocabulary_size=self.vocabulary_size,
            registered_unix_ns=registered_unix_ns,
            heartbeat_ms=max(1, round(self.heartbeat_seconds * 1000)),
            openai_endpoint=self.openai_endpoint,
            engine=self.engine,
            bootstrap_endpoint=self.bootstrap_endpoint,
            tokenizer=self.tokenizer,
            serves_structured_output=self.structured_output,
            reads_shared_storage=self.reads_shared_storage,
            storage_tiers=self.storage_tiers,
        )
