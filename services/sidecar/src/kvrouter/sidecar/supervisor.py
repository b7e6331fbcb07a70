"""Keeps one engine registered as a worker, through its restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from kvrouter.engines.relay.engine_sockets import EndpointRefused, ReplayFailed
from kvrouter.engines.relay.relaying import RelayedRanks, relaying
from kvrouter.engines.servers.api import EngineApi
from kvrouter.engines.servers.description import EngineDescription, NotDiscovered, describe
from kvrouter.engines.servers.detection import detect
from kvrouter.engines.servers.http import EngineAway, EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.pushed_load import following
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.errors import DescriptorMismatch, InvalidConfig
from kvrouter.publisher.registration import System
from kvrouter.publisher.worker_server import WorkerServer
from kvrouter.sidecar.engine_options import EngineOptions
from kvrouter.sidecar.served_engine import ServedEngine
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = structlog.get_logger(component="sidecar")

_NOT_READY = (EngineAway, UnexpectedAnswer, NotDiscovered)
"""Reasons why an engine cannot be described yet."""
_NOT_ACCEPTED = (DescriptorMismatch, InvalidConfig, EndpointRefused, ReplayFailed)
"""Reasons why an engine that is described cannot become a worker."""
_LONGEST_PAUSE_SECONDS = 5.0
_LEAST_REPORT_SECONDS = 0.05
"""Shortest time between two reports of a load that the engine publishes at every step."""


class EngineSupervisor:
    """Serves one engine: waits for it, registers it, and registers it anew when it has changed."""

    def __init__(
        self,
        options: EngineOptions,
        http: EngineHttp,
        on_ready: Callable[[bool], None],
        system: System | None = None,
    ) -> None:
        """``on_ready`` is called when the engine's worker begins or ceases to take requests.

        ``system`` is where the worker registers and publishes; by default the etcd and the NATS of the options.
        """
        self.options = options
        self.relayed: RelayedRanks = {}
        """The ranks whose events are relayed; empty while there is no worker."""
        self.engine: ServedEngine | None = None
        """The engine while it has a worker."""
        self.is_up = False
        """Whether the engine answered when it was last asked."""
        self.was_asked = False
        """Whether it is known if the engine is there: it has become a worker, or could not."""
        self.counts: Counter[str] = Counter()
        """Outages and registrations, failed readings of the load, and values that were unusable."""
        self.results: Counter[str] = Counter()
        """Requests that ended, by how."""
        self._http = http
        self._system = system
        self._on_ready = on_ready
        self._is_away = self._is_asleep = False
        self._is_wanted = True
        self._doubted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._worker: sdk.Worker | None = None
        self._running: asyncio.Task[None] | None = None
        self._log = log.bind(url=options.url, worker_id=options.worker_id)

    async def run(self) -> None:
        """Serves the engine until it is stopped.

        Raises:
            KeyTaken: another process registered the same worker.
        """
        self._running = asyncio.current_task()
        while not self._stopping.is_set():
            try:
                async with AsyncExitStack() as stack:
                    api, known = await self._join(stack)
                    await self._follow(api, known)
            except DescriptorMismatch as error:
                # The component's descriptor was lost and written by others meanwhile.
                self._log_refused(str(error))
            finally:
                await self._leave()

    @property
    def servers(self) -> list[WorkerServer]:
        """The worker's gRPC server; empty while there is no worker."""
        return [] if self._worker is None else [self._worker.server]

    @property
    def worker_key(self) -> str:
        """Key of the worker's registration; empty while there is no worker."""
        worker = self._worker
        return "" if worker is None else worker.config.component.worker_key(worker.config.worker_id)

    @property
    def is_settled(self) -> bool:
        """Whether all that the engine said until it became a worker is published, or it could not become one yet."""
        return self.was_asked and all(
            relay.caught_up and not publisher.stats().unsent_events for relay, _, publisher in self.relayed.values()
        )

    def set_wanted(self, wanted: bool) -> None:
        """Keeps requests away from the engine, or lets them reach it again. Its events are published anyway."""
        if wanted != self._is_wanted:
            self._is_wanted = wanted
            if self._worker is not None:
                self._announce_readiness(self._worker)

    def stop(self) -> None:
        """Lets running requests finish, deregisters the worker, and ends ``run``."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._worker is None and self._running is not None:
            self._running.cancel()  # it may wait for the engine or for etcd

    async def _join(self, stack: AsyncExitStack) -> tuple[EngineApi, EngineDescription]:
        """Registers the engine as a worker, as soon as it is ready and accepted."""
        async for attempt in _retrying(_NOT_ACCEPTED, self._log_refused):
            with attempt:
                api, known = await self._discover()
                engine = ServedEngine(self._http, api, known, self.results, self._doubted.set)
                config = self.options.worker_config(known)
                if known.events:
                    running = relaying(
                        config,
                        self.options.event_source(known),
                        self.options.translation(known),
                        self.relayed,
                        self._doubted.set,
                        engine=engine,
                        system=self._system,
                        wait_for_engine=False,
                    )
                else:
                    running = sdk.running(config, engine, self._system)
                self._worker = await stack.enter_async_context(running)
                self.engine = engine
                return api, known
        raise AssertionError("unreachable: the retry ends by return or by an exception")

    async def _leave(self) -> None:
        self._worker = self.engine = None
        self._is_away = self._is_asleep = False
        self.relayed.clear()
        self._on_ready(False)

    async def _follow(self, api: EngineApi, known: EngineDescription) -> None:
        """Reports the engine's load and watches it, until it has changed or is not needed any more."""
        worker, engine = self._worker, self.engine
        if worker is None or engine is None:
            raise AssertionError("_join has set both")
        self.was_asked = True
        self.counts["registrations"] += 1
        self._log.info(
            "sidecar.engine_registered",
            engine=known.kind,
            model=known.model,
            block_size=known.block_size,
            ranks=len(known.ranks),
            publishes_events=bool(known.events),
        )
        if known.why_no_events:
            self._log.warning(
                "sidecar.engine_without_events",
                reason=known.why_no_events,
                consequence="its cache is predicted from the requests that are routed to it",
            )
        elif known.events and not all(each.replay for each in known.events.values()):
            self._log.warning(
                "sidecar.engine_without_replay",
                consequence="its cache is unknown after lost events, until it is emptied",
                advice="add replay_endpoint to the engine's --kv-events-config",
            )
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._announce(worker))
            reporting = tasks.create_task(self._report_load(worker, engine, api, known))
            following_state = tasks.create_task(self._follow_state(worker, api))
            watching = tasks.create_task(self._watch(worker, engine, known))
            stopping = tasks.create_task(self._stopping.wait())
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (announcing, reporting, following_state, watching, stopping):
                task.cancel()

    async def _announce(self, worker: sdk.Worker) -> None:
        if not self._is_wanted:
            worker.set_accepting(False)
        await worker.registered()
        self._on_ready(worker.is_accepting)

    async def _watch(self, worker: sdk.Worker, engine: ServedEngine, known: EngineDescription) -> None:
        """Looks whether the engine is the same whenever that is in doubt. Returns when it is another one."""
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            try:
                async with asyncio.timeout(self.options.settings.engine_grace_seconds):
                    _, found = await self._discover()
            except TimeoutError:
                self.counts["outages"] += 1
                self._log.warning("sidecar.engine_away")
                self._is_away = True
                self._announce_readiness(worker)
                engine.fail_running()
                _, found = await self._discover()
            if found != known:
                self._log.warning("sidecar.engine_changed", changes=known.changes(found))
                return
            if self._is_away:
                self._log.info("sidecar.engine_back")
                self._is_away = False
                self._announce_readiness(worker)

    async def _follow_state(self, worker: sdk.Worker, api: EngineApi) -> None:
        """Registers adapters that come and go, and keeps requests away while the engine sleeps, for ever."""
        await worker.registered()
        while True:
            try:
                state = await api.state()
            except (EngineAway, UnexpectedAnswer):
                pass  # Reading the load notices an engine that is away.
            else:
                worker.set_lora_names(state.lora_names or tuple(self.options.settings.lora_ids.values()))
                if state.is_asleep != self._is_asleep:
                    self._log.info("sidecar.engine_asleep" if state.is_asleep else "sidecar.engine_awake")
                    self._is_asleep = state.is_asleep
                    self._announce_readiness(worker)
            await asyncio.sleep(self.options.settings.load_seconds)

    def _announce_readiness(self, worker: sdk.Worker) -> None:
        is_ready = self._is_wanted and not self._is_away and not self._is_asleep
        worker.set_accepting(is_ready)
        self._on_ready(is_ready)

    async def _report_load(
        self, worker: sdk.Worker, engine: ServedEngine, api: EngineApi, known: EngineDescription
    ) -> None:
        """Reports the load for ever: as the engine publishes it, or else as it answers when it is asked.

        A load that cannot be read is unknown, not 0.
        """
        if known.load_sockets:
            await self._report_pushed_load(worker, engine, api, known)
        was_known = True
        while True:
            try:
                engine.loads, unusable = await api.loads(known)
                self.counts["unusable_values"] += unusable
                reason = "" if engine.loads else "the engine reports no usable load"
            except (EngineAway, UnexpectedAnswer) as error:
                engine.loads, reason = {}, str(error)
                self.counts["load_failures"] += 1
                if isinstance(error, EngineAway):
                    self._doubted.set()
            if bool(reason) == was_known:
                was_known = not reason
                if reason:
                    self._log.warning("sidecar.load_unknown", error=reason)
                else:
                    self._log.info("sidecar.load_known")
            if engine.loads:
                await worker.report_load()
            await asyncio.sleep(self.options.settings.load_seconds)

    async def _report_pushed_load(
        self, worker: sdk.Worker, engine: ServedEngine, api: EngineApi, known: EngineDescription
    ) -> None:
        """Reports the load whenever the engine publishes it, for ever. Returns if a socket's address is unusable."""
        try:
            async with following(known.load_sockets, lambda payload: api.read_pushed_load(payload, known)) as pushed:
                while True:
                    await pushed.changed()
                    self.counts["unusable_values"] += pushed.take_unusable()
                    if pushed.take_disconnections():
                        self._doubted.set()
                    engine.loads = dict(pushed.loads)
                    if engine.loads:
                        await worker.report_load()
                    await asyncio.sleep(_LEAST_REPORT_SECONDS)
        except EndpointRefused as error:
            self._log.warning("sidecar.load_unknown", error=str(error))

    async def _discover(self) -> tuple[EngineApi, EngineDescription]:
        """Returns what the engine is, as soon as it is ready and says enough."""
        async for attempt in _retrying(_NOT_READY, self._log_not_ready):
            with attempt:
                try:
                    api = await detect(self._http, self.options.settings.engine_kind)
                    found = await api.discover()
                except EngineAway:
                    self.is_up = False
                    raise
                self.is_up = True
                host = self.options.advertised_host
                return api, describe(self.options.url, host, found, self.options.overrides)
        raise AssertionError("unreachable: the retry ends by return or by an exception")

    def _log_not_ready(self, reason: str) -> None:
        self.was_asked = True
        self._log.warning("sidecar.engine_not_ready", error=reason)

    def _log_refused(self, reason: str) -> None:
        self.was_asked = True
        self._log.warning("sidecar.worker_refused", error=reason)


def _retrying(reasons: tuple[type[Exception], ...], report: Callable[[str], None]) -> AsyncRetrying:
    """Returns attempts with growing pauses. ``report`` is called for each failure that differs from the one before."""
    last = ""

    def failed(state: RetryCallState) -> None:
        nonlocal last
        reason = str(state.outcome.exception()) if state.outcome else ""
        if reason != last:
            last = reason
            report(reason)

    return AsyncRetrying(
        retry=retry_if_exception_type(reasons),
        wait=wait_random_exponential(multiplier=0.2, max=_LONGEST_PAUSE_SECONDS),
        before_sleep=failed,
    )
