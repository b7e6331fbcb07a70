"""The options of one engine among those of the sidecar, and the worker that it becomes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kvrouter.engines.events.translation import TranslationOptions
from kvrouter.engines.relay.relaying import EventSource
from kvrouter.engines.servers.description import EngineDescription, Overrides
from kvrouter.net.tls.tls import is_loopback
from kvrouter.publisher.config import WorkerConfig
from kvrouter.runtime.config.fields import ROLES, TRANSPORTS
from kvrouter.runtime.tracing import tracer
from kvrouter.sidecar.engines_file import split_component
from kvrouter.sidecar.settings import EngineSettings, LocalEnginesSettings, SidecarSettings
from kvrouter.v1.common_pb2 import CopyCounting, Transport
from kvrouter.v1.names import ComponentName
from xxhash import xxh3_64_intdigest

_COPY_COUNTING = {"counted": CopyCounting.COPY_COUNTING_COUNTED, "set": CopyCounting.COPY_COUNTING_SET}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine."""

    name: str
    """The engine as an option or a source of engines names it: its URL, or COMPONENT=URL."""
    component: str
    """Name of the component that it joins."""
    url: str
    """Address of its HTTP API."""
    advertised_url: str
    """The same address as others reach it."""
    worker_id: int
    bind: str
    advertise: str
    overrides: Overrides
    settings: EngineSettings
    transport: Transport = Transport.TRANSPORT_UNSPECIFIED
    """Transport of its events; unspecified for the component's."""
    incarnation: str = ""
    """Changes with each restart of the engine; empty if it is unknown."""

    @property
    def advertised_host(self) -> str:
        """Host of the engine as others reach it, with brackets around an IPv6 address."""
        host = urlsplit(self.advertised_url).hostname or ""
        return f"[{host}]" if ":" in host else host

    def worker_config(self, engine: EngineDescription) -> WorkerConfig:
        """Returns the worker's configuration.

        Raises:
            InvalidConfig: a value is out of range.
        """
        settings = self.settings
        return WorkerConfig(
            component=ComponentName(settings.namespace, self.component),
            model=engine.model,
            block_size=engine.block_size,
            ranks=engine.ranks,
            worker_id=self.worker_id,
            etcd=settings.etcd_access(),
            nats=settings.nats_access(),
            bind=self.bind,
            advertise=self.advertise,
            tls=settings.tls_options(),
            service_token_file=settings.service_token_file,
            transport=self.transport,
            copy_counting=_COPY_COUNTING[settings.copy_counting],
            role=ROLES[engine.role],
            labels=settings.labels,
            lora_names=engine.lora_names or tuple(settings.lora_ids.values()),
            openai_endpoint=self.advertised_url if settings.forward == "yes" else "",
            engine=engine.kind if engine.is_identified else "",
            structured_output=True,
            bootstrap_endpoint=engine.bootstrap_endpoint,
            tokenizer=engine.tokenizer,
            publishes_events=bool(engine.events),
            max_model_len=engine.max_model_len,
            max_sequences=engine.max_sequences,
            load_report_seconds=0,  # reported whenever the engine was asked
            lease_ttl_seconds=settings.lease_seconds,
            drain_seconds=settings.drain_seconds,
            tracer=tracer(),
            state=settings.state if engine.events else None,
            state_seconds=settings.state_seconds,
            # Where nobody says when the engine began, state and engine are compared by their last message.
            engine_incarnation=(
                f"{self.url} {engine.model} {self.incarnation}".rstrip() if settings.state and engine.events else ""
            ),
        )

    def event_source(self, engine: EngineDescription) -> EventSource:
        """Returns where the engine publishes its events."""
        return EventSource(engine.events, engine.kind, self.settings.queued_messages, self.settings.replay_seconds)

    def translation(self, engine: EngineDescription) -> TranslationOptions:
        """Returns what the engine's events do not say."""
        return TranslationOptions(
            engine.block_size,
            {int(number): name for number, name in self.settings.lora_ids.items()},
            self.settings.full_reports,
            self.settings.offloaded_blocks,
        )


def options_of_engines(settings: SidecarSettings) -> Iterator[EngineOptions]:
    """Yields the options of each engine. Further engines have the next worker ids and ports."""
    for index, url in enumerate(settings.engine):
        worker_id = secrets.randbits(53) | 1 if settings.worker_id is None else settings.worker_id + index
        yield EngineOptions(
            name=url.rstrip("/"),
            component=settings.component,
            url=url.rstrip("/"),
            advertised_url=_of(settings.engine_advertise, index) or _reachable(url.rstrip("/"), settings.advertise),
            worker_id=worker_id,
            bind=_next_port(settings.bind, index),
            advertise=_next_port(settings.advertise, index),
            overrides=_overrides(settings, index, settings.kv_events, settings.kv_replay, needs_events=True),
            settings=settings,
            transport=TRANSPORTS[settings.transport],
        )


def worker_id_of(url: str) -> int:
    """Returns the id of a worker that is named by its engine's URL: the same for the same URL."""
    return xxh3_64_intdigest(url.rstrip("/").encode()) >> 11 | 1


def options_of_local_engine(settings: LocalEnginesSettings, name: str) -> EngineOptions:
    """Returns the options of an engine whose worker only this process reaches. Its URL gives the worker's id."""
    name = name.rstrip("/")
    component, url = split_component(name)
    named = [each.rstrip("/") for each in settings.engine]
    index = named.index(name) if name in named else None
    overrides = _overrides(settings, index, settings.engine_events, settings.engine_replay, needs_events=False)
    if settings.engine_role and index is not None:
        overrides = replace(overrides, role=settings.engine_role[index])
    return EngineOptions(
        name=name,
        component=component or settings.component,
        url=url,
        advertised_url=url,
        worker_id=worker_id_of(url),
        bind="127.0.0.1:0",
        advertise="",
        overrides=overrides,
        settings=settings,
    )


def options_of_pod(settings: SidecarSettings, url: str) -> EngineOptions:
    """Returns the options of an engine in a pod. Its URL gives the worker's id, and the worker has a free port."""
    return EngineOptions(
        name=url,
        component=settings.component,
        url=url,
        advertised_url=url,
        worker_id=worker_id_of(url),
        bind=settings.bind,
        advertise=settings.advertise,
        overrides=_overrides(settings, None, (), (), needs_events=False),
        settings=settings,
        transport=TRANSPORTS[settings.transport],
    )


def _overrides(
    settings: EngineSettings, index: int | None, events: tuple[str, ...], replay: tuple[str, ...], *, needs_events: bool
) -> Overrides:
    """``index`` is the engine's among those of the options; None if it has joined later."""
    return Overrides(
        model=settings.model or None,
        block_size=settings.block_size,
        dp_size=settings.dp_size,
        total_blocks=settings.total_blocks,
        kv_events=_of(events, index),
        kv_replay=_of(replay, index),
        kv_topic=settings.kv_topic,
        max_model_len=settings.max_model_len,
        max_sequences=settings.max_sequences,
        role=settings.role,
        tokenizer=settings.tokenizer,
        bootstrap_endpoint=_of(settings.bootstrap_endpoint, index),
        needs_events=needs_events,
    )


def _of(values: tuple[str, ...], index: int | None) -> str:
    return values[index] if values and index is not None else ""


def _next_port(address: str, offset: int) -> str:
    """Returns an address with a higher port; unchanged if it has none, or 0 for a free one."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not int(port):
        return address
    return f"{host}:{int(port) + offset}"


def _reachable(url: str, advertise: str) -> str:
    """Returns an engine's URL with the host of ``advertise``, if its own is a loopback address."""
    parts = urlsplit(url)
    host = advertise.rpartition(":")[0] if advertise.rpartition(":")[2].isdecimal() else advertise
    if not host or not is_loopback(parts.hostname or ""):
        return url
    return parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host).geturl()
