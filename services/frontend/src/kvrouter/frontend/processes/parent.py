"""The parent of a Frontend of several processes: holds the ports, starts and replaces the children, merges metrics.

It serves no requests and uses no gRPC. Children are started by exec, since gRPC does not survive a fork.

Counters and histograms are summed, including the counts of processes that died since: Prometheus takes a sum that
falls for a restart. Gauges keep one series for each process, with the label ``process``: only some of them add up.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import structlog
from aiohttp import web
from kvrouter.frontend.access.quotas import shared_file
from kvrouter.frontend.processes.child import Assignment, Report
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.net.backoff import Backoff
from kvrouter.net.calls.limits import MISSES, HeartbeatMonitor
from kvrouter.net.tls import Tls
from kvrouter.runtime.http_connections import nobody
from kvrouter.runtime.http_server import HttpLimits, serving_http
from kvrouter.runtime.process.hosting import shared_port
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.runtime.telemetry.metrics import Exposition, MetricsHandler, new_registry
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_SUMMED = ("counter", "histogram")

_Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a sample and its labels."""


class MergedMetrics(Collector):
    """The metrics of all processes, as they reported them last."""

    def __init__(self) -> None:
        self._current: dict[str, list[Metric]] = {}
        self._families: dict[str, tuple[str, str]] = {}
        """Help text and type of each summed family."""
        self._ended: dict[str, dict[_Series, float]] = {}
        """Counts of processes that died, by family."""

    def report(self, process: str, text: str) -> None:
        """Replaces the metrics of a process by the given exposition."""
        self._current[process] = list(text_string_to_metric_families(text))

    def end(self, process: str) -> None:
        """Keeps the counts of a process that has died, and drops its gauges."""
        for family in self._current.pop(process, ()):
            if family.type in _SUMMED:
                self._families[family.name] = family.documentation, family.type
                _add(self._ended.setdefault(family.name, {}), [family])

    def exposition(self) -> bytes:
        """Returns the merged metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the names are known only when a process has reported."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the merged families."""
        summed = {name: dict(counts) for name, counts in self._ended.items()}
        families = dict(self._families)
        gauges: dict[str, Metric] = {}
        for process, reported in self._current.items():
            for family in reported:
                if family.type in _SUMMED:
                    families[family.name] = family.documentation, family.type
                    _add(summed.setdefault(family.name, {}), [family])
                    continue
                gauge = gauges.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    gauge.add_sample(sample.name, {**sample.labels, "process": process}, sample.value)
        for name, counts in summed.items():
            merged = Metric(name, *families[name])
            for (sample_name, labels), value in counts.items():
                merged.add_sample(sample_name, dict(labels), value)
            yield merged
        yield from gauges.values()


def _add(counts: dict[_Series, float], families: Iterable[Metric]) -> None:
    for family in families:
        for sample in family.samples:
            series = sample.name, tuple(sample.labels.items())
            counts[series] = counts.get(series, 0.0) + sample.value


log = structlog.get_logger(component="frontend")

_REPORT_SECONDS = 1.0
"""Interval of reports, and maximum time to wait for one. A child that does not answer in time keeps its last report."""
_REPORT_BYTES = 64 << 20
_MAX_CONNECTIONS = 256
_FIRST_RESTART_SECONDS, _LONGEST_RESTART_SECONDS = 0.2, 10.0
_STEADY_SECONDS = 60.0
"""Time after which a restarted child counts as recovered."""
_KILL_SECONDS = 5.0
"""Time beyond its draining after which a child is killed."""
_BASE_LENGTH = 48
"""Length to which the parent's instance id is cut, so those of its children are valid."""
_PARENT = "parent"
"""Label ``process`` of the parent's own gauges."""


class ProcessMetrics:
    """The parent's own metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.live = Gauge(
            "kvrouter_frontend_processes", "Live processes of a Frontend with --processes.", registry=registry
        )
        self.restarts = Counter(
            "kvrouter_frontend_process_restarts",
            "Processes of a Frontend that died or hung and were replaced.",
            registry=registry,
        )


class FrontendProcesses:
    """Several processes serving as one Frontend."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._merged = MergedMetrics()
        self._children: dict[str, _Child] = {}
        self._registry = new_registry()
        self._tls = Tls.of(settings.tls_options())
        self._metrics = ProcessMetrics(self._registry)
        self._limits_file = -1
        self._metrics.live.set_function(lambda: len(self._children))

    async def run(self, stopping: asyncio.Event) -> None:
        """Serves until ``stopping`` is set, then drains all children.

        Raises:
            BindFailed: an address cannot be listened on.
            StartRefused: a child does not start.
        """
        settings = self._settings
        host, _, port = settings.bind.rpartition(":")
        with ExitStack() as ports:
            self._limits_file = ports.enter_context(shared_file(settings.processes)).fileno()
            http_port = ports.enter_context(shared_port(settings.host, settings.port))
            grpc_port = ports.enter_context(shared_port(host.strip("[]"), int(port)))
            shared = {"port": http_port, "bind": f"{host}:{grpc_port}", "http_bind": ""}
            scheme = "http" if self._tls is None else "https"
            async with self._serving_ops() as address, asyncio.TaskGroup() as group:
                for number in range(settings.processes):
                    keeping = self._keep(str(number), shared, f"{scheme}://{address}/metrics", stopping)
                    group.create_task(keeping, name=f"frontend-process {number}")

    async def _keep(self, name: str, shared: dict[str, object], metrics_url: str, stopping: asyncio.Event) -> None:
        """Keeps one child running; each start has an instance id of its own, so sessions are not confused."""
        back_off = Backoff(_FIRST_RESTART_SECONDS, _LONGEST_RESTART_SECONDS)
        starts = 0
        while not stopping.is_set():
            own = {"instance_id": _instance_id(self._settings.instance_id, name, starts), "processes": 1}
            if self._settings.record:
                record = Path(self._settings.record)
                own["record"] = str(record.with_name(f"{record.name}.{name}"))
            settings = self._settings.model_copy(update=shared | own)
            text = settings.model_dump_json(exclude_unset=True)
            child = await _Child.start(name, self._assignment(text, metrics_url, name, is_restart=starts > 0))
            try:
                began = asyncio.get_running_loop().time()
                await self._follow(child, stopping)
                if stopping.is_set():
                    return
                if not starts and not child.has_listened:
                    raise StartRefused(f"process {name} of the Frontend did not start: its log has the cause")
            finally:
                self._children.pop(name, None)
                self._merged.end(name)
                await child.stop(self._settings.drain_seconds + _KILL_SECONDS)
            if asyncio.get_running_loop().time() - began > _STEADY_SECONDS:
                back_off.succeeded()
            pause = back_off.failed()
            log.error("process.died", process=name, status=child.status, restart_after_seconds=round(pause, 2))
            self._metrics.restarts.inc()
            starts += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stopping.wait()

    def _assignment(self, settings: str, metrics_url: str, name: str, *, is_restart: bool) -> Assignment:
        return Assignment(
            settings, metrics_url, is_restart, self._limits_file, int(name), processes=self._settings.processes
        )

    async def _follow(self, child: _Child, stopping: asyncio.Event) -> None:
        """Reads the child's reports until it dies or ``stopping`` is set. Kills a child without reports."""
        reading = asyncio.create_task(self._read(child))
        stopped = asyncio.create_task(stopping.wait())
        watching = asyncio.create_task(self._kill_when_silent(child))
        try:
            while not reading.done() and not stopped.done():
                await asyncio.wait({reading, stopped}, timeout=_REPORT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                child.request_report()
        finally:
            for task in (reading, stopped, watching):
                task.cancel()
            await asyncio.wait({reading, stopped, watching})

    async def _kill_when_silent(self, child: _Child) -> None:
        """Kills a child that has hung. The kernel would go on passing it its share of the new connections."""
        seconds = self._settings.process_silence_seconds
        monitor = HeartbeatMonitor()
        while not monitor.silent:
            await asyncio.sleep(seconds / MISSES)
            if child.heard or not child.has_listened:
                monitor.heard()
            child.heard = False
            monitor.tick()
        log.error("process.silent", process=child.name, pid=child.pid, seconds=seconds)
        child.kill()

    async def _read(self, child: _Child) -> None:
        async for report in child.reports():
            if child.name not in self._children:
                self._children[child.name] = child
                log.info("process.listening", process=child.name, pid=child.pid)
            self._merged.report(child.name, report.metrics)

    @asynccontextmanager
    async def _serving_ops(self) -> AsyncIterator[str]:
        """Serves metrics, health and readiness of the whole; yields the address."""
        host, _, port = (self._settings.http_bind or "127.0.0.1:0").rpartition(":")
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", MetricsHandler(self._exposition).send),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
            ]
        )
        limits = HttpLimits(_MAX_CONNECTIONS, self._settings.http_header_seconds)
        address = host.strip("[]") or None, int(port)
        async with serving_http(
            application,
            *address,
            limits,
            self._registry,
            name="ops",
            tls=self._tls,
            recognizes=nobody,
            shutdown_timeout=1.0,
        ) as (_, bound):
            log.info("http.listening", address=f"{host}:{bound}", encrypted=self._tls is not None)
            yield f"{host or '127.0.0.1'}:{bound}"

    async def _exposition(self) -> Exposition:
        await asyncio.gather(*(child.reported() for child in list(self._children.values())))
        began = time.thread_time()
        self._merged.report(_PARENT, generate_latest(self._registry).decode())
        return self._merged.exposition(), time.thread_time() - began

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        await asyncio.gather(*(child.reported() for child in list(self._children.values())))
        processes = {name: child.is_ready for name, child in sorted(self._children.items())}
        ready = any(processes.values())
        return web.json_response({"ready": ready, "processes": processes}, status=200 if ready else 503)


class _Child:
    """A child process and its reports."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.has_listened = False
        self.is_ready = False
        self.heard = False
        """Whether a report arrived since this was last set to False."""
        self._process = process
        self._changed = asyncio.Event()

    @classmethod
    async def start(cls, name: str, assignment: Assignment) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvrouter.frontend.processes.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_REPORT_BYTES,
            pass_fds=(assignment.limits_file,),
            start_new_session=True,  # Signals of a terminal reach the parent alone, which passes them on once.
        )
        child = cls(name, process)
        child._write(msgspec.json.encode(assignment))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    def request_report(self) -> None:
        if self.has_listened:
            self._write(b"")

    async def reported(self) -> None:
        """Requests a report and waits for the next one, for a short time."""
        self._changed.clear()
        self.request_report()
        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                await self._changed.wait()

    async def reports(self) -> AsyncIterator[Report]:
        """Yields reports until the child ends."""
        output = self._process.stdout
        assert output is not None  # noqa: S101 - a pipe
        while line := await output.readline():
            try:
                report = msgspec.json.decode(line, type=Report)
            except msgspec.DecodeError:
                log.exception("process.report_malformed", process=self.name)
                return
            self.has_listened, self.heard, self.is_ready = True, True, report.ready
            self._changed.set()
            yield report

    def kill(self) -> None:
        """Kills the child, which may be stopped and so deaf to other signals."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, seconds: float) -> None:
        """Drains the child and waits for its end; kills it after ``seconds``, or if this task is cancelled."""
        try:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            log.warning("process.killed", process=self.name, after_seconds=seconds)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    def _write(self, line: bytes) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(line + b"\n")


def _instance_id(base: str, name: str, starts: int) -> str:
    own = f"{base[:_BASE_LENGTH]}-{name}"
    return f"{own}-{starts}" if starts else own
