"""Options of the sidecar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from kvrouter.engines.servers.description import NO_EVENTS
from kvrouter.engines.servers.detection import EngineKindOption
from kvrouter.runtime.config.fields import (
    Address,
    EngineKeysFile,
    LoraIds,
    RoleOption,
    TransportOption,
    check_socket_endpoint,
    unless_empty,
)
from kvrouter.runtime.config.settings import Name, ServiceSettings
from kvrouter.sidecar.engines_file import checked_engine, checked_url, read_engines, split_component
from kvrouter.sidecar.kubernetes.selection import PodSelection, PoolName, read_pool_name, read_selection
from pydantic import AfterValidator, Field, model_validator


def _checked_sockets(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    """Checks the endpoints of engines' sockets. NO_EVENTS stands for an engine without events."""
    return tuple(each if each == NO_EVENTS else check_socket_endpoint(each) for each in endpoints)


_EventSockets = Annotated[tuple[str, ...], AfterValidator(_checked_sockets)]
_Urls = Annotated[tuple[str, ...], AfterValidator(lambda urls: tuple(map(checked_url, urls)))]


class EngineSettings(ServiceSettings):
    """What is said of engines, whoever serves them."""

    per_engine: ClassVar[tuple[str, ...]] = ("bootstrap_endpoint",)
    """Options with one value for each engine, in the order of the engines."""

    engine: tuple[str, ...]
    engine_pods: Annotated[str, unless_empty(read_selection)] = ""
    """Kubernetes pods with engines, which come and go with them: [NAMESPACE:]LABELS[:PORT]. LABELS is a label
    selector, PORT that of the HTTP API (8000). Without NAMESPACE, it is that of the process."""
    inference_pool: Annotated[str, unless_empty(read_pool_name)] = ""
    """InferencePool whose pods have the engines, [NAMESPACE/]NAME; instead of --engine-pods."""
    engine_kind: EngineKindOption = "auto"
    """Which engine it is; auto asks it."""
    engine_keys_file: EngineKeysFile = ""
    forward: Literal["yes", "no"] = "yes"
    """Whether Frontends forward requests of the OpenAI API to the engine's own; otherwise the Frontend tokenizes
    them and the engine gets tokens, so that streams continue on another engine if one dies."""
    kv_topic: str = ""
    """Topic of the events; others are ignored. Empty for any topic."""
    component: Name = "workers"
    """Name of the component that the engines join."""
    model: str = ""
    """Name of the model that clients send; by default the engine is asked."""
    block_size: int | None = Field(default=None, ge=1, le=1 << 20)
    """Tokens per KV block of the engine; by default the engine is asked."""
    dp_size: int | None = Field(default=None, ge=1, le=1024)
    """Number of data-parallel ranks; by default the engine is asked."""
    total_blocks: int | None = Field(default=None, ge=1, lt=1 << 63)
    """KV blocks of each rank in device memory; by default the engine is asked."""
    max_model_len: int | None = Field(default=None, ge=0, lt=1 << 32)
    """Most prompt and output tokens together, 0 for no limit; by default the engine is asked."""
    max_sequences: int | None = Field(default=None, ge=1, lt=1 << 32)
    """Requests that each rank runs at once; by default the engine is asked."""
    role: RoleOption | None = None
    """Role of the engine; by default the engine is asked, and both if it does not say."""
    tokenizer: str = ""
    """Path or name of the model's tokenizer; by default where the engine loaded its model."""
    bootstrap_endpoint: tuple[Address, ...] = ()
    """Address at which decode workers meet each prefill engine, host:port; by default the engine is asked."""
    copy_counting: Literal["counted", "set"] = "counted"
    """Whether the engine reports each physical copy of a block, or a set of blocks."""
    full_reports: bool = False
    """Whether requests make the engine report their hits too (kv_cache_report_mode: full)."""
    offloaded_blocks: int = Field(default=1, ge=1, le=1 << 20)
    """Blocks in a chunk that the engine offloads and reports by its last hash alone."""
    lora_ids: LoraIds = Field(default_factory=dict)
    """Names of LoRA adapters by number, for engines that report numbers only."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for routing constraints."""
    load_seconds: float = Field(default=1.0, gt=0, le=3600)
    """Interval at which the engine's load, LoRA adapters and sleep are read, in seconds."""
    answer_seconds: float = Field(default=5.0, gt=0)
    """Longest time for the engine to answer about itself, in seconds."""
    replay_seconds: float = Field(default=10.0, gt=0)
    """Longest time between two messages of a replay, in seconds."""
    queued_messages: int = Field(default=100_000, ge=1)
    """Messages that wait in each subscription; further ones are replayed."""
    engine_grace_seconds: float = Field(default=5.0, ge=0)
    """Time without an answer of the engine before routers avoid it, in seconds."""

    state: Path | None = None
    """Directory with snapshots of what engines have cached, from which a restarted process resumes; a sidecar needs a
    worker id too. None keeps nothing."""
    state_seconds: float = Field(default=10.0, gt=0, le=86_400)
    """Least interval of the snapshots, in seconds. A killed process needs the engines' messages since the last one."""

    @model_validator(mode="after")
    def _has_one_value_for_each_engine(self) -> EngineSettings:
        for name in self.per_engine:
            count = len(getattr(self, name))
            if count not in {0, len(self.engine)}:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: expected one for each of {len(self.engine)} engines, received {count}")
        if len({split_component(each)[1] for each in self.engine}) < len(self.engine):
            raise ValueError("--engine: the same engine is named twice")
        if self.engine_pods and self.inference_pool:
            raise ValueError("--inference-pool: cannot be combined with --engine-pods; name one of them")
        return self

    @property
    def pods(self) -> PodSelection | PoolName | None:
        """The pods that have engines, by label selector or by pool; None if no option names any."""
        if self.inference_pool:
            return read_pool_name(self.inference_pool)
        return read_selection(self.engine_pods) if self.engine_pods else None


class SidecarSettings(EngineSettings):
    """Options of ``kvrouter sidecar``; each is a flag, an environment variable and a key of the file."""

    per_engine = ("kv_events", "kv_replay", "engine_advertise", "bootstrap_endpoint")

    engine: _Urls = ()
    """URL of the engine's HTTP API, http://host:port. May be repeated for several engines."""
    kv_events: _EventSockets = ()
    """Endpoint of rank 0's PUB socket for each engine, tcp://host:port or ipc://path, or none if it publishes no
    events. By default the engine is asked."""
    kv_replay: _EventSockets = ()
    """Endpoint of rank 0's replay socket for each engine; only with --kv-events."""
    engine_advertise: _Urls = ()
    """URL at which others reach each engine; none for that of --engine, with the host of --advertise if it is a
    loopback address."""
    worker_id: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Id of the first engine's worker in its component; further engines have the next ids. None draws them at
    random."""
    transport: TransportOption = "default"
    """Transport of the events; default is the component's."""

    @model_validator(mode="after")
    def _is_complete(self) -> SidecarSettings:
        if not self.engine and self.pods is None:
            raise ValueError("--engine: name an engine, or the pods of engines with --engine-pods or --inference-pool")
        if self.pods is not None and (not self.bind.endswith(":0") or self.advertise.rpartition(":")[2].isdecimal()):
            raise ValueError(
                "--engine-pods: each worker needs a port of its own; give --bind port 0, and --advertise no port"
            )
        if self.kv_replay and not self.kv_events:
            raise ValueError("--kv-replay: name the events' sockets with --kv-events, too")
        if self.state is not None and self.engine and self.worker_id is None:
            raise ValueError("--state: name the worker with --worker-id, so that its state is found again")
        return self


class LocalEnginesSettings(EngineSettings):
    """Options of ``kvrouter serve`` for engines that it serves itself, without etcd and NATS."""

    section = "engines"
    per_engine = ("engine_events", "engine_replay", "engine_role", "bootstrap_endpoint")

    engine: Annotated[tuple[str, ...], AfterValidator(lambda engines: tuple(map(checked_engine, engines)))] = ()
    """URL of an engine, http://host:port: the process serves it without etcd and NATS. May be repeated. Engines of
    another model or role join a component of their own, which COMPONENT=URL names."""
    engines_file: Path | None = None
    """File with more engines, one on each line as in --engine, which may change while the process runs."""
    peer: tuple[Address, ...] = Field(default=(), max_length=64)
    """gRPC address, host:port, of another such process before the same engines, with which this one shares its
    bookings. May be repeated; this process's own address is left out."""
    engine_events: _EventSockets = ()
    """Endpoint of rank 0's PUB socket for each engine, tcp://host:port or ipc://path, or none if its events are not
    to be used. By default the engine is asked."""
    engine_replay: _EventSockets = ()
    """Endpoint of rank 0's replay socket for each engine; only with --engine-events."""
    engine_role: tuple[RoleOption, ...] = ()
    """Role of each engine, if roles differ and the engines do not report them; instead of --role."""

    @model_validator(mode="after")
    def _is_usable(self) -> LocalEnginesSettings:
        if self.engines_file is not None:
            try:
                read_engines(self.engines_file)
            except ValueError as error:
                raise ValueError(f"--engines-file: {error}") from None
        if self.peer and not self.names_engines:
            raise ValueError("--peer: name the engines with --engine, --engines-file or --engine-pods, too")
        if self.engine_replay and not self.engine_events:
            raise ValueError("--engine-replay: name the events' sockets with --engine-events, too")
        return self

    @property
    def names_engines(self) -> bool:
        """Whether the process serves engines itself."""
        return bool(self.engine) or self.engines_file is not None or self.pods is not None
