"""``kvrouter serve``: runs services in one process, without sockets between them. Listed engines need no brokers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.running import RunningSystem, announced
from kvrouter.frontend import app as frontend
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.schedulers.scheduler_choice import LocalScheduler, RemoteSchedulers, SchedulerSource
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.indexer import app as indexer
from kvrouter.indexer.api.query_server import serving_queries
from kvrouter.indexer.api.service import IndexerService
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.net.local import LocalSystem
from kvrouter.runtime.config.settings import RoutingSettings, ServiceSettings, load_all
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.process import lifecycle
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.rpc import RpcServer
from kvrouter.scheduler import app as scheduler
from kvrouter.scheduler.overlap.indexer_query import OverlapIndex
from kvrouter.scheduler.replication.peer_network import REPLICA_SERVICE, PeerNetwork
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.sidecar.engine_options import options_of_local_engine
from kvrouter.sidecar.engines_file import engines_in
from kvrouter.sidecar.followed_engines import FollowedEngines, following_engines
from kvrouter.sidecar.local_workers import LocalWorkers
from kvrouter.sidecar.settings import LocalEnginesSettings
from kvrouter.v1.message_limits import MessageLimits

ROLES: Mapping[str, type[ServiceSettings]] = {
    "indexer": IndexerSettings,
    "scheduler": SchedulerSettings,
    "frontend": FrontendSettings,
}
"""The services that can share a process, in the order of their start: each may use those before it."""

PROGRAM = "kvrouter serve"
ABOUT = """Run several services in one process. With --engine URL (below) it needs no
other process than the engines.

  --roles NAMES         Services to run, separated by commas: indexer,
                        scheduler, frontend. Default: all. The options below
                        are those of these services.

"""
"""Beginning of the help."""


def serve(roles: Sequence[str], options: Sequence[str]) -> NoReturn:
    """Serves the roles until SIGTERM or SIGINT, and exits. Invalid options end the process with one line and status 2.

    Args:
        roles: Keys of ROLES, each once.
        options: Flags of the services; each is valid if at least one of them has it.
    """
    ordered = [role for role in ROLES if role in roles]
    *loaded, engines = load_all(
        [*(ROLES[role] for role in ordered), LocalEnginesSettings], options, prog=PROGRAM, about=ABOUT
    )
    settings = dict(zip(ordered, loaded, strict=True))
    if "frontend" in settings and settings["frontend"].processes > 1:
        raise WrongUsage("--processes: the services share one process here; start kvrouter-frontend on its own")
    _check_static(settings)
    local = _local_system(engines, settings)
    common = settings[ordered[0]]

    async def main(stopping: asyncio.Event) -> None:
        async with open_runtime(common, local=local) as runtime, AsyncExitStack() as running:
            served: FollowedEngines | None = None
            if local is not None:
                options_of = partial(options_of_local_engine, engines)
                following = following_engines(engines, options_of, runtime.registry, system=LocalWorkers(local))
                served = await running.enter_async_context(following)
                if engines.engines_file is not None:
                    served.follow("engines file", engines_in(engines.engines_file))
            peers = _peers(engines, settings, runtime)
            services = await _compose(settings, runtime, running, served, peers)
            internal = [] if peers is None else [(REPLICA_SERVICE, peers)]
            with ExitStack() as announcing:

                def announce(server: RpcServer) -> None:
                    for words in _addresses(services, common, settings.get("frontend")):
                        print(words, flush=True)  # noqa: T201
                    announcing.enter_context(announced(_running(settings, engines, runtime, server.endpoint(""))))

                await host(runtime, services, stopping, started=announce, internal=internal)

    lifecycle.run(main, common, "+".join(ordered))


def _addresses(services: Sequence[Hosted], common: ServiceSettings, front: FrontendSettings | None) -> list[str]:
    """Returns lines with the addresses of the HTTP API and of the page, for a reader of standard output."""
    http = next((each.http_endpoint for each in services if each.kind == "frontend"), "")
    if front is None or not http:
        return []
    host, _, port = http.rpartition(":")
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - browsers open no wildcard
    url = f"{'https' if common.tls_cert_file else 'http'}://{here}:{port}"
    return [f"HTTP API  {url}", *([f"Web page  {url}/ui/"] if front.web_page else [])]


def _running(
    settings: Mapping[str, Any], engines: LocalEnginesSettings, runtime: Runtime, address: str
) -> RunningSystem:
    listening = dict.fromkeys(settings, address)
    common = runtime.settings
    etcd = "" if runtime.etcd is None else common.etcd
    followed = "" if engines.engines_file is None else str(engines.engines_file.absolute())
    return RunningSystem("serve", **listening, etcd=etcd, namespace=common.namespace, engines_file=followed)


def _local_system(engines: LocalEnginesSettings, settings: Mapping[str, Any]) -> LocalSystem | None:
    """Returns what takes the place of etcd and NATS; None if there are no engines to serve."""
    if not engines.names_engines:
        return None
    if missing := [role for role in ROLES if role not in settings]:
        raise WrongUsage(f"--engine: a system without etcd and NATS is one process; add --roles {','.join(missing)}")
    if settings["scheduler"].replica_sync:
        raise WrongUsage("--engine: replica sync needs NATS; name the other processes with --peer instead")
    front = settings["frontend"]
    is_public = front.api_keys or front.jwt_keys
    if engines.peer and is_public and not (front.service_token_file or front.tls_client_auth == "required"):
        # The peers' calls arrive on the port of the clients', and show no key of the API.
        raise WrongUsage("--peer: with keys for clients, processes must know each other by --service-token-file")
    return LocalSystem()


def _check_static(settings: Mapping[str, Any]) -> None:
    listed = {
        role for role in settings if isinstance(settings[role], RoutingSettings) and settings[role].static_workers
    }
    if not listed:
        return
    if "indexer" in settings:
        raise WrongUsage("--static-workers: listed workers publish no events; leave the role indexer out")
    if listed != set(settings):
        raise WrongUsage("static_workers is set for one role only: set it for all")
    if "scheduler" not in settings and settings["frontend"].lacks_scheduler():
        raise WrongUsage("--static-workers: name the Schedulers with --static-schedulers")


def _peers(engines: LocalEnginesSettings, settings: Mapping[str, Any], runtime: Runtime) -> PeerNetwork | None:
    """Returns the other processes before the same engines; None if there are none."""
    if not engines.peer:
        return None
    return PeerNetwork(
        engines.peer,
        runtime.instance_id,
        runtime.tls,
        heartbeat_seconds=settings["scheduler"].replica_heartbeat_seconds,
        clock=time.monotonic,
    )


async def _compose(
    settings: Mapping[str, Any],
    runtime: Runtime,
    running: AsyncExitStack,
    engines: FollowedEngines | None,
    peers: PeerNetwork | None,
) -> list[Hosted]:
    hosted: list[Hosted] = []
    index: OverlapIndex | None = None
    own: tuple[str, Scheduler] | None = None
    guard: Access | None = None
    if "indexer" in settings:
        indexing = await running.enter_async_context(indexer.running(settings["indexer"], runtime))
        ready = _Start(indexing, runtime.directory, engines).is_ready if engines else lambda: indexing.ready
        hosted.append(Hosted("indexer", indexing, ready, limits=_limits(settings["indexer"])))
        index = indexing
    if "scheduler" in settings:
        # The Indexer of this process serves every component.
        indexers = None if index is None else lambda _component: index
        deciding = scheduler.running(settings["scheduler"], runtime, indexers, peers=peers)
        scheduling = await running.enter_async_context(deciding)
        hosted.append(Hosted("scheduler", scheduling, lambda: scheduling.ready, limits=_limits(settings["scheduler"])))
        own = (runtime.instance_id, cast(Scheduler, scheduling))
    if "frontend" in settings:
        unregistered = own[1] if own is not None and settings["frontend"].static_workers else None
        if unregistered is not None:
            schedulers: SchedulerSource = LocalScheduler(unregistered)
        else:
            found = RemoteSchedulers(
                runtime.directory,
                own,
                client_name=runtime.instance_id,
                counts=runtime.call_streams.client("scheduler"),
            )
            schedulers = await running.enter_async_context(aclosing(found))
        service = await running.enter_async_context(frontend.running(settings["frontend"], runtime, schedulers))
        serving = frontend.serving_http(service, settings["frontend"], runtime, scheduler=unregistered)
        address = await running.enter_async_context(serving)
        limits = frontend.request_limits(settings["frontend"])
        hosted.append(Hosted("frontend", service, service.ready, address, limits))
        # The services share a port, so clients must not reach the others' calls there either.
        hosted = [replace(each, guard=service.access) for each in hosted]
        guard = service.access
    if "indexer" in settings:
        own_index = settings["indexer"]
        queries = serving_queries(
            indexing, runtime, own_index.query_bind, max_prompt_tokens=own_index.max_prompt_tokens, guard=guard
        )
        await running.enter_async_context(queries)
    return hosted


def _limits(settings: IndexerSettings | SchedulerSettings) -> MessageLimits:
    return MessageLimits(elements=settings.max_prompt_tokens)


class _Start:
    """Readiness of an index that is read from the engines of this process."""

    def __init__(self, indexing: IndexerService, directory: Directory, engines: FollowedEngines) -> None:
        self._indexing = indexing
        self._directory = directory
        self._engines = engines
        self._began = False

    def is_ready(self) -> bool:
        """Returns False until each engine was asked, and the caches of those that answered are indexed."""
        self._began = self._began or (self._engines.are_settled and self._knows_all() and self._indexing.compared)
        return self._began and self._indexing.ready

    def _knows_all(self) -> bool:
        views = self._directory.components.items()
        return self._engines.worker_keys <= {name.worker_key(each) for name, view in views for each in view.workers}
