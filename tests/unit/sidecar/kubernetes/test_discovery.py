"""Engines found at an API server that is away, slow, forgetful, strict or gone."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.devtools.system.ports import free_port
from kvrouter.sidecar.kubernetes import api_server
from kvrouter.sidecar.kubernetes.discovery import PodDiscovery
from kvrouter.sidecar.kubernetes.selection import PodSelection, PoolName
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from ....kube_api_server import (
    TOKEN,
    KubeApiServer,
    as_in_a_pod,
    as_with_kubectl,
    pod,
    pool,
    serving_kube_api,
    write_kubeconfig,
)
from ....waiting import until

PODS = PodSelection("app=vllm")
ONE, TWO, THREE = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


class Found:
    """The engines that were found last."""

    def __init__(self, discovery: PodDiscovery, registry: CollectorRegistry) -> None:
        self.discovery = discovery
        self.changes = discovery.engines()
        self.urls: set[str] = set()
        self._registry = registry

    async def until(self, *urls: str) -> None:
        """Waits until exactly these engines are found."""
        async with asyncio.timeout(30):
            while self.urls != set(urls):
                self.urls = {each.url for each in await anext(self.changes)}

    @property
    def is_up(self) -> bool:
        return bool(self._registry.get_sample_value("kvrouter_kubernetes_up"))


@asynccontextmanager
async def finding(wanted: PodSelection | PoolName = PODS) -> AsyncIterator[Found]:
    registry = CollectorRegistry()
    discovery = PodDiscovery(wanted, registry)
    found = Found(discovery, registry)
    async with asyncio.TaskGroup() as tasks, aclosing(found.changes):
        running = tasks.create_task(discovery.run())
        yield found
        running.cancel()


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeApiServer]:
    async with serving_kube_api() as server:
        as_with_kubectl(monkeypatch, tmp_path, server)
        await server.put(pod("one", "10.0.0.1"), pod("other", "10.0.0.9", app="web"))
        yield server


async def test_pods_come_and_go(kube: KubeApiServer) -> None:
    async with finding() as found:
        await found.until(ONE)
        await kube.put(pod("two", "10.0.0.2"))
        await found.until(ONE, TWO)
        await kube.terminate("one")
        await found.until(TWO)
        await kube.delete("one")
        await kube.put(pod("two", "10.0.0.2", app="retired"), pod("three", "10.0.0.3"))
        await found.until(THREE)
        assert (kube.lists, kube.watches) == (1, 1)
        assert found.is_up


async def test_a_list_has_pages(kube: KubeApiServer) -> None:
    kube.page = 1
    await kube.put(pod("two", "10.0.0.2"), pod("three", "10.0.0.3"))
    kube.forgets_pages = 1  # The list begins anew if its version is gone in the middle.
    async with finding() as found:
        await found.until(ONE, TWO, THREE)
    assert kube.lists == 2


@pytest.mark.parametrize("bookmarked", [True, False])
async def test_a_watch_that_ends_continues_at_its_last_version(kube: KubeApiServer, bookmarked: bool) -> None:
    async with finding() as found:
        await found.until(ONE)
        await kube.put(pod("two", "10.0.0.2"))
        await found.until(ONE, TWO)
        if bookmarked:
            await kube.bookmark()
        last = kube.version
        await until(lambda: found.discovery._followed[0]._version == str(last))
        await kube.end_watches()
        await until(lambda: kube.watches == 2 and kube.running == 1)
        assert f"resourceVersion={last}&" in kube.sent[-1]
        await kube.put(pod("three", "10.0.0.3"))
        await found.until(ONE, TWO, THREE)
    assert kube.lists == 1


async def test_a_version_that_is_gone_is_listed_anew(kube: KubeApiServer) -> None:
    async with finding() as found:
        await found.until(ONE)
        await until(lambda: kube.running == 1)
        with capture_logs() as logs:
            await kube.forget()
            await kube.put(pod("two", "10.0.0.2"))
            await kube.delete("one")
            await kube.end_watches()
            await found.until(TWO)
    assert kube.lists == 2
    assert [each["event"] for each in logs] == []


@pytest.mark.parametrize("last", [b"", b'{"type": "MODIFIED", "object": {"metada', b"<html>\n", b'{"type": "ADDED"}\n'])
async def test_a_cut_watch_loses_nothing(kube: KubeApiServer, last: bytes) -> None:
    async with finding() as found:
        await found.until(ONE)
        await until(lambda: kube.running == 1)
        await kube.cut_watches(last)
        await kube.put(pod("two", "10.0.0.2"))
        await found.until(ONE, TWO)
        await until(lambda: found.is_up)


async def test_a_server_is_back_without_any_change(kube: KubeApiServer) -> None:
    async with finding() as found:
        await found.until(ONE)
        await until(lambda: kube.running == 1)
        with capture_logs() as logs:
            await kube.cut_watches()
            await until(lambda: any(each["event"] == "kubernetes.back" for each in logs))
        assert found.is_up
        assert kube.lists == 1


async def test_slow_answers_are_read_whole(kube: KubeApiServer) -> None:
    kube.slow_bytes = 3
    async with finding() as found:
        await found.until(ONE)
        await kube.put(pod("two", "10.0.0.2"))
        await found.until(ONE, TWO)
    assert (kube.lists, kube.watches) == (1, 1)


async def test_a_server_that_hangs_is_asked_again(kube: KubeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_server, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(api_server, "_WATCH_SECONDS", 0.2)
    kube.hangs = True
    async with finding() as found:
        await until(lambda: len(kube.sent) > 2)
        kube.hangs = False
        await found.until(ONE)
        await until(lambda: found.is_up)
        kube.hangs = True  # The next watch has no answer, as that on a connection that died in silence.
        await until(lambda: not found.is_up)
        await kube.put(pod("two", "10.0.0.2"))
        kube.hangs = False
        await found.until(ONE, TWO)


async def test_watches_that_end_at_once_are_opened_more_and_more_slowly(
    kube: KubeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def longest(least: float, most: float) -> float:
        pauses.append(most)
        return least

    monkeypatch.setattr(random, "uniform", longest)
    kube.ends_watches = True
    async with finding() as found:
        await found.until(ONE)
        await until(lambda: len(pauses) > 7)
        kube.ends_watches = False
        await kube.put(pod("two", "10.0.0.2"))
        await found.until(ONE, TWO)
    assert pauses[:7] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert kube.lists == 1


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        ((403, "Forbidden", "pods is forbidden"), "the API server answers 403: pods is forbidden"),
        (
            (500, "InternalError", "etcdserver: leader changed"),
            "the API server answers 500: etcdserver: leader changed",
        ),
    ],
)
async def test_what_refuses_is_logged_once_and_changes_nothing(
    kube: KubeApiServer, refusal: tuple[int, str, str], cause: str
) -> None:
    async with finding() as found:
        await found.until(ONE)
        with capture_logs() as logs:
            kube.refuses = refusal
            await kube.delete("one")
            await kube.cut_watches()
            asked = len(kube.sent)
            await until(lambda: len(kube.sent) > asked + 3)
            assert not found.is_up
            kube.refuses = None
            await found.until()
            await kube.put(pod("two", "10.0.0.2"))
            await found.until(TWO)
            assert found.is_up
    causes = [each["cause"] for each in logs if each["event"] == "kubernetes.away"]
    assert causes.count(next(each for each in causes if cause in each)) == 1
    assert [each["event"] for each in logs][-1] == "kubernetes.back"


async def test_an_expired_token_is_read_again(kube: KubeApiServer, tmp_path: Path) -> None:
    another = f"{TOKEN}-2"
    async with finding() as found:
        await found.until(ONE)
        await until(lambda: kube.running == 1)
        with capture_logs() as logs:
            kube.tokens = {another}
            await kube.end_watches()
            await until(lambda: any("401" in each.get("cause", "") for each in logs))
            write_kubeconfig(tmp_path / "kubeconfig", kube, token=another)
            await kube.put(pod("two", "10.0.0.2"))
            await found.until(ONE, TWO)
    assert another not in json.dumps(logs)


async def test_a_pod_uses_its_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = DevelopmentAuthority(tmp_path / "certs").issue("apiserver")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate.cert, certificate.key)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with serving_kube_api(tls) as server:
        port = int(server.url.rpartition(":")[2])
        as_in_a_pod(monkeypatch, port, token, certificate.authority, namespace="inference")
        await server.put(pod("one", "10.0.0.1"))
        await server.put(pod("two", "10.0.0.2"), namespace="inference")
        async with finding() as found:
            await found.until(TWO)
            server.tokens = {f"{TOKEN}-2"}
            await server.end_watches()
            await until(lambda: not found.is_up)
            token.write_text(f"{TOKEN}-2")  # as the kubelet replaces it
            await server.put(pod("three", "10.0.0.3"), namespace="inference")
            await found.until(TWO, THREE)


async def test_a_server_that_is_away_at_the_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with capture_logs() as logs:
        async with finding() as found:
            await until(lambda: bool(logs))  # There is no kubeconfig either.
            write_kubeconfig(tmp_path / "kubeconfig", KubeApiServer(url=f"http://127.0.0.1:{free_port()}"))
            await until(lambda: len({each["cause"] for each in logs}) > 1)
            assert not found.is_up
            async with serving_kube_api() as server:
                await server.put(pod("one", "10.0.0.1"))
                write_kubeconfig(tmp_path / "kubeconfig", server)
                await found.until(ONE)


async def test_a_pool_names_the_pods(kube: KubeApiServer) -> None:
    await kube.put(pod("decode", "10.0.0.3", app="decode"))
    async with finding(PoolName("qwen")) as found:
        await until(lambda: kube.running == 1)
        await kube.put(pool("other", 9000, app="web"), pool("qwen", 8000, app="vllm"))
        await found.until(ONE)
        await kube.put(pool("qwen", 8000, 8001, app="vllm"))
        await found.until(ONE, "http://10.0.0.1:8001")
        await kube.put(pool("qwen", 8000, app="decode"))
        await found.until(THREE)
        await until(lambda: kube.running == 2)
        with capture_logs() as logs:
            await kube.delete("qwen", "inferencepools")
            await until(lambda: bool(logs))
            await kube.put(pod("more", "10.0.0.2", app="decode"))
            await found.until(THREE, TWO)  # The last pods count.
        assert [(each["event"], each["cause"]) for each in logs] == [
            ("inference_pool.unusable", "there is no such pool")
        ]
        assert found.is_up
