"""Discovery at a real kube-apiserver, with the account and the rights of the sample.

There are no nodes: the test writes what a kubelet would. It skips unless ``KVROUTER_KUBE_APISERVER`` or the PATH has
the binary of kube-apiserver.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.sidecar.kubernetes.selection import PodSelection, PoolName

from ...kube_api_server import as_in_a_pod, pod
from ...unit.sidecar.kubernetes.test_discovery import finding
from ...waiting import until

BINARY = os.environ.get("KVROUTER_KUBE_APISERVER") or shutil.which("kube-apiserver") or ""
SAMPLE = Path(__file__).parents[3] / "deploy/kubernetes/inference-pool.yaml"
ADMIN = "token-of-the-administrator"
NAMESPACE = "inference"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    },
    "spec": {
        "group": "inference.networking.k8s.io",
        "names": {"kind": "InferencePool", "plural": "inferencepools", "singular": "inferencepool"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not BINARY, reason="no kube-apiserver: set KVROUTER_KUBE_APISERVER"),
]


class Cluster:
    """A kube-apiserver that can be started again, and its administrator."""

    def __init__(self, directory: Path, etcd: str) -> None:
        self.port = free_port()
        self.authority = DevelopmentAuthority(directory / "certs")
        certificate = self.authority.issue("apiserver")
        (directory / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        self.command = Command(
            "kube-apiserver",
            (
                *(BINARY, "--etcd-servers", f"http://{etcd}", "--secure-port", str(self.port)),
                *("--bind-address", "127.0.0.1", "--authorization-mode", "RBAC"),
                *("--tls-cert-file", str(certificate.cert), "--tls-private-key-file", str(certificate.key)),
                *("--token-auth-file", str(directory / "tokens.csv"), "--service-account-issuer", "https://test"),
                *("--service-account-key-file", str(certificate.cert)),
                *(
                    "--service-account-signing-key-file",
                    str(certificate.key),
                    "--service-cluster-ip-range",
                    "10.9.0.0/24",
                ),
                *("--disable-admission-plugins", "ServiceAccount", "--watch-cache=true"),
            ),
            {"PATH": os.environ["PATH"]},
        )
        self._directory = directory
        self._process: ManagedProcess | None = None

    async def start(self) -> None:
        self._process = await ManagedProcess.start(self.command, self._directory)
        async with asyncio.timeout(60):
            while True:
                try:
                    if await self.call("GET", "/readyz") == "ok":
                        return
                except (aiohttp.ClientError, AssertionError):
                    await asyncio.sleep(0.2)

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.stop(10)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Calls the API as the administrator."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, f"https://127.0.0.1:{self.port}{path}", json=body, headers=headers, ssl=False
            ) as response,
        ):
            assert response.status < 300, await response.text()
            return await response.json() if "json" in response.content_type else await response.text()

    async def put_pod(self, name: str, ip: str, **labels: str) -> None:
        """Creates a pod on a node, with the status that a kubelet would report."""
        wanted = pod(name, ip, **labels)
        containers = [{"name": "engine", "image": "an/engine:1", "ports": [{"containerPort": 8000}]}]
        metadata = {"name": name, "labels": wanted["metadata"]["labels"]}
        spec = {"containers": containers, "nodeName": "a-node"}
        await self.call("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        await self.report(name, wanted["status"])

    async def report(self, name: str, status: Any) -> None:
        started = [each | {"image": "an/engine:1", "imageID": ""} for each in status["containerStatuses"]]
        reported = status | {"containerStatuses": started, "podIPs": [{"ip": status["podIP"]}]}
        await self.call("PATCH", f"{PODS}/{name}/status", {"status": reported})

    async def token(self) -> str:
        """Returns a new token of the sample's account."""
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/kvrouter"
        return str((await self.call("POST", f"{account}/token", request))["status"]["token"])


@asynccontextmanager
async def running_cluster(directory: Path, etcd: EtcdServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory, etcd.endpoint)
    try:
        await cluster.start()
        await cluster.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
        await cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for document in yaml.safe_load_all(SAMPLE.read_text()):
            group = document["apiVersion"]
            if document["kind"] != "Namespace" and not group.startswith("gateway."):
                plural = f"{document['kind'].lower()}s".replace("policys", "policies")
                where = "api" if group == "v1" else "apis"
                path = f"/{where}/{group}/namespaces/{NAMESPACE}/{plural}?fieldValidation=Strict"
                await cluster.call("POST", path, document)
        yield cluster
    finally:
        await cluster.kill()


async def create_account(cluster: Cluster) -> None:
    account = {"metadata": {"name": "kvrouter"}}
    await cluster.call("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)


async def test_engines_are_followed_at_a_real_api_server(
    own_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(tmp_path, own_etcd) as cluster:
        token = tmp_path / "token"
        token.write_text(await cluster.token())
        as_in_a_pod(monkeypatch, cluster.port, token, cluster.authority.certificate_path, NAMESPACE)
        await cluster.put_pod("one", "10.0.0.1")
        await cluster.put_pod("web", "10.0.0.9", app="web")
        one, two, three = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))
        async with finding(PodSelection("app=vllm")) as found, finding(PoolName("qwen")) as pooled:
            await found.until(one)
            await cluster.put_pod("two", "10.0.0.2")
            await found.until(one, two)
            (before,) = [each for each in found.discovery._found if each.url == one]
            await cluster.report("one", pod("one", "10.0.0.1", restarts=1, ready=False)["status"])

            def restarted() -> bool:
                (now,) = [each for each in found.discovery._found if each.url == one]
                return now.incarnation != before.incarnation and not now.is_ready

            await until(restarted)
            # The pod is on a node, so it terminates until the kubelet says that it has ended.
            await cluster.call("DELETE", f"{PODS}/one")
            await found.until(two)
            assert (await cluster.call("GET", f"{PODS}/one"))["metadata"]["deletionTimestamp"]
            await cluster.call("DELETE", f"{PODS}/one?gracePeriodSeconds=0")

            spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
            await cluster.call("PATCH", f"{POOLS}/qwen", {"spec": spec})
            await pooled.until(two, two.replace("8000", "8001"))

            # Versions of before are gone from a server that starts again after a compaction.
            await cluster.kill()
            await until(lambda: not found.is_up)
            await cluster.start()
            await cluster.put_pod("three", "10.0.0.3")
            await found.until(two, three)
            await until(lambda: found.is_up and pooled.is_up)

            # Tokens end with their account.
            await cluster.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/kvrouter")
            await create_account(cluster)
            for followed in found.discovery._followed:
                followed._version = "1"  # so that the next watch finds its version gone
            await cluster.kill()
            await cluster.start()
            await until(lambda: "401" in found.discovery._followed[0]._cause)
            token.write_text(await cluster.token())
            await cluster.call("DELETE", f"{PODS}/two?gracePeriodSeconds=0")
            await found.until(three)
