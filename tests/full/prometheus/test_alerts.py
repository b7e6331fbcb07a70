"""The shipped alert rules in a real Prometheus that scrapes running systems, whose parts are then broken.

The last test sees to it that every rule is provoked.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName, service_key
from kvrouter.v1.registry_pb2 import ComponentDescriptor

from ...faults import full_disk
from ...faults.full_disk import NatsOnSmallDisk
from ...integration.frontend.access.keys import Keys
from ...raw_nats import raw_nats
from .monitored import MODEL, SHIPPED, Monitored

pytestmark = pytest.mark.timeout(290)

DISK_BYTES = 32 << 20
POISON = 31_999
FREES_NOTHING = """
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates
BookingUpdates.free = lambda *_, **__: None
"""
APPLIES_SLOWLY = """
import time
from kvrouter.indexer.index.event_applier import EventApplier
applied = EventApplier.apply
def apply(*batch):
    time.sleep(0.05)
    return applied(*batch)
EventApplier.apply = apply
EventApplier.apply_at_once = lambda *_: 0
"""
KEEPS_STATE_TO_ITSELF = """
from kvrouter.scheduler.replication.nats_network import NatsTransport
async def ignore(*_): pass
NatsTransport._answer = ignore
"""


def test_promtool_accepts_the_rules_and_provokes_each_alert(prometheus_bin: Path) -> None:
    for command in (
        ["check", "rules", "kvrouter.rules.yml"],
        ["test", "rules", "kvrouter.test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        done = subprocess.run(
            [str(prometheus_bin / "promtool"), *command], cwd=SHIPPED, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
async def monitored(
    tmp_path: Path, own_nats: NatsServer, own_etcd: EtcdServer, namespace: str, prometheus_bin: Path
) -> AsyncIterator[Monitored]:
    async with AsyncExitStack() as stack:
        started = Monitored(stack, tmp_path, own_nats, own_etcd, namespace)
        await started.open_prometheus(prometheus_bin)
        yield started


async def test_lost_parts_of_a_system_raise_alerts(monitored: Monitored, tmp_path: Path) -> None:
    await monitored.start("indexer")
    await monitored.start("scheduler", "--router-mode", "kv")
    recording = ("--record", str(tmp_path / "traffic.jsonl"), "--record-max-bytes", "4096")
    collector = ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}")
    await monitored.start("frontend", "--request-timeout-seconds", "1", *recording, *collector)
    await monitored.start("mocker", "--clock-factor", "50", "--heartbeat-seconds", "1")
    await monitored.until_served()
    # There is no collector, and a recording of 4 KiB is soon full.
    await monitored.until_firing("KvrouterTracesLost", "KvrouterBoundNearlyFull", meanwhile=monitored.request)

    async with connect(monitored.etcd.endpoint) as etcd:
        await etcd.put(service_key(monitored.namespace, "frontend", "garbage").encode(), b"\xff\xff\xff")
        forged = ComponentDescriptor(model="other", block_size=64, hash_scheme="xxh3-1337")
        workers = ComponentName(monitored.namespace, "workers")
        await etcd.put(workers.descriptor_key.encode(), forged.SerializeToString())
    await monitored.until_firing("KvrouterUndecodableEntries", "KvrouterDescriptorConflict")

    monitored.signal("mocker", signal.SIGSTOP)
    await monitored.until_firing(
        "KvrouterWorkersUnhealthy", "KvrouterRequestsFail", "KvrouterRanksSilent", meanwhile=monitored.request
    )
    monitored.signal("mocker", signal.SIGCONT)

    monitored.processes["indexer"].kill()
    await monitored.until_firing("KvrouterProcessDown", "KvrouterRoutedOnLoadAlone", meanwhile=monitored.request)

    quiet = {"KvrouterNatsDisconnected", "KvrouterRegistrationsOutdated", "KvrouterListedWorkersMissing"}
    assert not quiet & await monitored.firing()
    await monitored.nats.kill()
    await monitored.start("indexer", name="without-nats")
    await monitored.until_firing("KvrouterNatsDisconnected", "KvrouterNotReady")
    await monitored.etcd.kill()
    await monitored.until_firing("KvrouterRegistrationsOutdated")


async def test_a_slow_engine_raises_alerts(monitored: Monitored) -> None:
    await monitored.start("scheduler", "--router-mode", "forecast", "--overload-lag-ms", "20")
    await monitored.start("frontend", "--worker-stall-seconds", "0")
    # One prompt fills the cache, and its prefill takes half a minute.
    await monitored.start("mocker", "--clock-factor", "0.0005", "--num-blocks", "4", "--max-sequences", "1")
    requests = [asyncio.create_task(monitored.request(max_tokens=4)) for _ in range(4)]
    try:
        monitored.signal("scheduler", signal.SIGSTOP)
        await asyncio.sleep(3)
        monitored.signal("scheduler", signal.SIGCONT)
        await monitored.until_firing("KvrouterSchedulerOverloaded")

        async def pause() -> None:
            monitored.signal("scheduler", signal.SIGSTOP)
            await asyncio.sleep(0.3)
            monitored.signal("scheduler", signal.SIGCONT)

        await monitored.until_firing("KvrouterEventLoopBlocked", meanwhile=pause)
        await monitored.until_firing("KvrouterFirstTokenSlow", "KvrouterQueueStuck")
    finally:
        for each in requests:
            each.cancel()
        await asyncio.wait(requests)


async def test_a_faulty_index_raises_alerts(
    tmp_path: Path, own_etcd: EtcdServer, namespace: str, prometheus_bin: Path
) -> None:
    if reason := full_disk.unavailable():
        pytest.skip(reason)
    nats = NatsOnSmallDisk(tmp_path / "nats", DISK_BYTES)
    await nats.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nats.kill)
        monitored = Monitored(stack, tmp_path, nats, own_etcd, namespace)
        await monitored.open_prometheus(prometheus_bin)
        await _break_the_index(monitored, nats)


async def _break_the_index(monitored: Monitored, nats: NatsOnSmallDisk) -> None:
    workers, silent = ComponentName(monitored.namespace, "workers"), ComponentName(monitored.namespace, "silent")
    live = ComponentName(monitored.namespace, "live")
    await monitored.start("indexer")
    await monitored.start("indexer", "--max-index-blocks", "1", name="small", defect=APPLIES_SLOWLY)
    await monitored.start("scheduler", "--router-mode", "kv")
    await monitored.start("frontend")
    await monitored.start("mocker", "--clock-factor", "50", "--worker-id", "1", "--heartbeat-seconds", "60")
    # Its cache has room for one prompt, and it publishes no events: the Scheduler expects those that it has evicted.
    off = ("--no-events", "--num-blocks", "4", "--component", silent.name, "--model", "surprising")
    await monitored.start("mocker", *off, "--clock-factor", "50", name="without-events")
    core = ("--transport", "core-nats", "--component", live.name, "--model", "live")
    await monitored.start("mocker", *core, name="live")
    await monitored.until_served()

    number = iter(range(1 << 20))

    async def surprise() -> None:
        await monitored.request(model="surprising", prompt=[next(number) % 2] * 48)

    async def store() -> None:
        await monitored.request(prompt=[next(number)] * 64)

    await monitored.until_firing("KvrouterPredictionsOff", meanwhile=surprise)
    await monitored.until_firing("KvrouterIndexEvicts", meanwhile=store)

    async with raw_nats(nats.url) as client:
        client.publish(workers.events_subject(1, 0).encode(), b"\xff\xff\xff")
        await client.flush()
        await monitored.until_firing("KvrouterEventsFaulty")

        monitored.signal("indexer", signal.SIGSTOP)
        await store()
        stored = time.monotonic()
        for _ in range(20_000):
            client.publish(live.live_subject(7, 0).encode(), b"x")
        await client.flush()
        await asyncio.sleep(max(0.0, stored + 6 - time.monotonic()))
        monitored.signal("mocker", signal.SIGSTOP)
        monitored.signal("indexer", signal.SIGCONT)
        await monitored.until_firing("KvrouterEventsLag", "KvrouterNatsDropsMessages")
        monitored.signal("mocker", signal.SIGCONT)

    await monitored.start("mocker", "--component", "beating", "--heartbeat-seconds", "1", name="beating")
    beating = 'kvrouter_indexer_ranks{process="indexer",component="beating"} == 1'
    await monitored.until(lambda: monitored.query(beating), "the heartbeats of a rank")
    nats.fill()
    await monitored.until_firing("KvrouterStreamStopped")


async def test_faults_of_single_processes_raise_alerts(monitored: Monitored, tmp_path: Path) -> None:
    await monitored.start("scheduler", "--router-mode", "kv", "--replica-sync", defect=KEEPS_STATE_TO_ITSELF)
    await monitored.start("mocker", "--clock-factor", "50")
    await monitored.start("frontend", defect=FREES_NOTHING)
    await monitored.until_served()

    keys = Keys(tmp_path / "keys.json")
    keys.add("known")
    keys.write()
    keys.path.chmod(0o600)
    guarded = ("--api-keys", str(keys.path), "--processes", "2")
    await monitored.start("frontend", *guarded, name="guarded")
    listed = ("--static-workers", f"127.0.0.1:{free_port()}", "--static-model", MODEL)
    await monitored.start("scheduler", "--router-mode", "random", *listed, name="listed", where=False)
    engine = (
        "--kv-events",
        f"tcp://127.0.0.1:{free_port()}",
        "--block-size",
        "16",
        "--component",
        "relayed",
        "--model",
        "relayed",
    )
    await monitored.start("relay", *engine)
    await monitored.start("sidecar", "--engine-pods", "app=vllm")  # There is no API server.
    missing = ("KvrouterListedWorkersMissing", "KvrouterEngineAway", "KvrouterPodsUnknown")
    await monitored.until_firing("KvrouterBookingsLeak", *missing)

    for number in range(3):
        fragile = ("--component", "fragile", "--model", "fragile", "--poison-token", str(POISON))
        await monitored.start("mocker", *fragile, name=f"fragile-{number}")

    async def poison() -> None:
        await monitored.request(model="fragile", prompt=[POISON] * 64)

    await monitored.until_firing("KvrouterPoisonPrompts", meanwhile=poison)

    async def guess() -> None:
        await asyncio.gather(*(monitored.request("guarded", key="kvr_guess.wrong") for _ in range(50)))

    await monitored.until_firing("KvrouterAccessRefused", meanwhile=guess)
    keys.path.write_text("{", encoding="utf-8")
    await monitored.until_firing("KvrouterApiKeysRejected")

    os.kill(_a_child_of(monitored.processes["guarded"].pid), signal.SIGKILL)
    await monitored.until_firing("KvrouterFrontendProcessesRestart")

    await monitored.start("scheduler", "--router-mode", "kv", "--replica-sync", name="other")
    await monitored.until_firing("KvrouterReplicasDisagree")

    scheduler = await _certified(monitored.directory)
    await monitored.start("scheduler", "--router-mode", "kv", *scheduler, name="certified", scheme="https")
    await monitored.until_firing("KvrouterCertificateExpires")


async def _certified(directory: Path) -> tuple[str, ...]:
    """Makes certificates that expire soon and returns the options of a Scheduler with one of them."""
    command = [str(Path(sys.executable).with_name("kvrouter")), "certs", str(directory / "certs"), "--days", "2"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    made = directory / "certs"
    return ("--tls-cert-file", str(made / "scheduler.crt"), "--tls-key-file", str(made / "scheduler.key"))


def _a_child_of(parent: int) -> int:
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()[0])


def test_every_alert_is_provoked() -> None:
    rules = (SHIPPED / "kvrouter.rules.yml").read_text(encoding="utf-8")
    provoked = set(re.findall(r'"(Kvrouter\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert set(re.findall(r"- alert: (\w+)", rules)) - provoked == set()
