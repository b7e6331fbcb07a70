"""What an engine says of itself, completed by the options that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from kvrouter.engines.relay.engine_sockets import Endpoints

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})  # noqa: S104 - compared, not listened on


def at_host(endpoint: str, host: str) -> str:
    """Returns an endpoint that an engine listens on as others connect to it: a wildcard is the engine's host."""
    name, colon, port = urlsplit(endpoint).netloc.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or name not in _WILDCARDS:
        return endpoint
    return tcp(host, int(port)) if port.isdecimal() else endpoint


def tcp(host: str, port: int) -> str:
    """Returns the endpoint of a TCP socket."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


EngineKind = Literal["vllm", "sglang"]
EngineRole = Literal["both", "prefill", "decode"]

NO_EVENTS = "none"
"""Value of --kv-events for an engine that publishes none."""

_OPTIONS = {
    "model": "--model",
    "block_size": "--block-size",
    "events": f"--kv-events, with {NO_EVENTS} if the engine publishes none",
}


_ENABLE_EVENTS = {
    "vllm": '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:6557"}\'',
    "sglang": '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:6557"}\'',
}
"""Option of each engine that makes it publish its events."""


class NotDiscovered(Exception):
    """An engine does not say something that is required. The message names each, and the option that gives it."""

    def __init__(self, url: str, missing: Mapping[str, str]) -> None:
        """``missing`` maps what is missing to the reason."""
        reasons = "; ".join(
            f"{name.replace('_', ' ')} ({reason}): set {_OPTIONS[name]}" for name, reason in missing.items()
        )
        super().__init__(f"{url}: cannot discover {reasons}")
        self.missing = dict(missing)


@dataclass(slots=True)
class Discovered:
    """What an engine said. None stands for what it did not say."""

    kind: EngineKind
    is_identified: bool = False
    """Whether something that it said shows that it is of this kind."""
    model: str | None = None
    block_size: int | None = None
    ranks: Mapping[int, int | None] | None = None
    """KV blocks by data-parallel rank, None if unknown."""
    events: Mapping[int, Endpoints] | None = None
    """Event sockets by rank; empty if the engine publishes none."""
    load_sockets: Mapping[int, Endpoints] = field(default_factory=dict)
    """Sockets on which the engine publishes its load, by rank; empty if it has to be asked."""
    max_model_len: int | None = None
    max_sequences: int | None = None
    role: EngineRole | None = None
    tokenizer: str | None = None
    bootstrap_port: int | None = None
    smaller_priority_first: bool = True
    lora_names: tuple[str, ...] = ()
    problems: dict[str, str] = field(default_factory=dict)
    """Why something is not known, by the name of its attribute."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the options say of an engine. None leaves it to discovery."""

    model: str | None = None
    block_size: int | None = None
    dp_size: int | None = None
    total_blocks: int | None = None
    kv_events: str = ""
    """Endpoint of rank 0, NO_EVENTS, or empty."""
    kv_replay: str = ""
    kv_topic: str = ""
    max_model_len: int | None = None
    max_sequences: int | None = None
    role: EngineRole | None = None
    tokenizer: str = ""
    bootstrap_endpoint: str = ""
    needs_events: bool = True
    """Whether an engine without events is refused, unless ``kv_events`` says that it has none."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """All that the sidecar needs to know of an engine. An engine that changes any of it is registered anew."""

    kind: EngineKind
    model: str
    block_size: int
    ranks: Mapping[int, int | None]
    """KV blocks by data-parallel rank, None if unknown."""
    events: Mapping[int, Endpoints]
    """Event sockets by rank; empty if the engine publishes none."""
    max_model_len: int
    """Most prompt and output tokens together; 0 for no limit."""
    role: EngineRole
    tokenizer: str
    bootstrap_endpoint: str
    max_sequences: int | None = None
    """Requests that each rank runs at once; None if unknown."""
    load_sockets: Mapping[int, Endpoints] = field(default_factory=dict)
    """Sockets on which the engine publishes its load, by rank; empty if it has to be asked."""
    is_identified: bool = False
    """Whether the engine has shown that it is of this kind, and not only an option says so."""
    smaller_priority_first: bool = True
    """Whether it serves requests with a smaller priority earlier, as vLLM does; SGLang does on request."""
    lora_names: tuple[str, ...] = field(default=(), compare=False)
    """Adapters come and go while an engine runs, which must not cost it its registration."""
    why_no_events: str = field(default="", compare=False)
    """Why it publishes none, and the option of the engine that mends it; empty if it does, or is not meant to."""

    def changes(self, other: EngineDescription) -> dict[str, str]:
        """Returns what differs in ``other``, for a log."""
        compared = [each.name for each in fields(self) if each.compare]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in compared}
        return {name: f"{before} -> {after}" for name, (before, after) in pairs.items() if before != after}


def describe(url: str, host: str, found: Discovered, given: Overrides) -> EngineDescription:
    """Returns an engine's description.

    Args:
        url: Address of the engine's HTTP API, for errors.
        host: Host at which others reach the engine.
        found: What the engine said.
        given: What the options say, which counts more.

    Raises:
        NotDiscovered: neither says something that is required.
    """
    model, block_size, events = given.model or found.model, given.block_size or found.block_size, found.events
    ranks = _ranks(found, given)
    if given.kv_events == NO_EVENTS:
        events = {}
    elif given.kv_events:
        events = {
            rank: Endpoints.of_rank(given.kv_events, given.kv_replay, given.kv_topic, rank) for rank in sorted(ranks)
        }
    elif events is not None and not events:
        found.problems["events"] = (
            f"the engine has its KV events disabled: start it with {_ENABLE_EVENTS[found.kind]}, or"
        )
        events = None
    elif events is not None and set(events) != set(ranks):
        found.problems["events"] = f"expected sockets of ranks {sorted(ranks)}, received those of {sorted(events)}"
        events = None
    why_no_events = ""
    if events is None and not given.needs_events:
        why_no_events = found.problems.get("events", "the engine does not say").removesuffix(", or")
        events = {}
    required = {"model": model, "block_size": block_size, "events": events}
    missing = {
        name: found.problems.get(name, "the engine does not say") for name, value in required.items() if value is None
    }
    if missing or model is None or block_size is None or events is None:
        raise NotDiscovered(url, missing)
    bootstrap = given.bootstrap_endpoint or (f"{host}:{found.bootstrap_port}" if found.bootstrap_port else "")
    return EngineDescription(
        kind=found.kind,
        model=model,
        block_size=block_size,
        ranks=ranks,
        events=events,
        max_model_len=given.max_model_len if given.max_model_len is not None else found.max_model_len or 0,
        max_sequences=given.max_sequences or found.max_sequences,
        role=given.role or found.role or "both",
        tokenizer=given.tokenizer or found.tokenizer or "",
        bootstrap_endpoint=bootstrap,
        load_sockets=found.load_sockets if set(found.load_sockets) == set(ranks) else {},
        is_identified=found.is_identified,
        smaller_priority_first=found.smaller_priority_first,
        lora_names=found.lora_names,
        why_no_events=why_no_events,
    )


def _ranks(found: Discovered, given: Overrides) -> dict[int, int | None]:
    said = found.ranks or dict.fromkeys(found.events or {0})
    chosen = range(given.dp_size) if given.dp_size else sorted(said)
    return {rank: given.total_blocks or said.get(rank) for rank in chosen}


class Model(msgspec.Struct):
    """An entry of ``/v1/models``."""

    id: str
    root: str | None = None
    """Path or name that the model was loaded from."""
    parent: str | None = None
    """Base model of a LoRA adapter."""
    max_model_len: int | None = None
    owned_by: str | None = None
    """The engine: ``vllm`` or ``sglang``."""


class Models(msgspec.Struct):
    """The page ``/v1/models``."""

    data: list[Model]

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the LoRA adapters, in order."""
        return tuple(sorted(each.id for each in self.data if each.parent))


def read_models(found: Discovered, models: Models) -> None:
    """Takes the model, its longest request and the adapters from the list of models."""
    base = next((each for each in models.data if not each.parent), None)
    if base is None:
        found.problems["model"] = "GET /v1/models lists no base model"
        return
    found.model = base.id
    found.tokenizer = base.root
    found.max_model_len = base.max_model_len
    found.lora_names = models.lora_names
