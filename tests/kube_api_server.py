"""A Kubernetes API server that has pods and InferencePools only, and misbehaves on request.

It speaks the protocol of kube-apiserver 1.36: lists in pages, watches from a version, bookmarks, versions that are gone
in the middle of a watch and for the rest of a list, and failures as Status objects.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio.config import incluster_config
from kvrouter.sidecar.kubernetes import api_server

POOLS = "inference.networking.k8s.io"
TOKEN = "of-the-service-account"  # noqa: S105 - of this server only


def pod(name: str, ip: str = "", *, ready: bool = True, restarts: int = 0, uid: str = "", **labels: str) -> Any:
    """Returns a running pod with one container that declares port 8000."""
    return {
        "metadata": {"name": name, "uid": uid or f"uid-of-{name}", "labels": labels or {"app": "vllm"}},
        "spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"name": "engine", "restartCount": restarts, "ready": ready}],
        },
    }


def pool(name: str, *ports: int, **labels: str) -> Any:
    """Returns an InferencePool."""
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name}, "spec": spec}


def failure(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@dataclass
class KubeApiServer:
    """Its objects, and how it misbehaves."""

    url: str = ""
    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    """Those that it accepts."""
    version: int = 100
    oldest: int = 0
    """Watches of earlier versions get 410."""
    lists: int = 0
    """Lists that began, without their further pages."""
    watches: int = 0
    """Watches that began."""
    running: int = 0
    """Watches that run."""
    refuses: tuple[int, str, str] | None = None
    """Code, reason and message of the answer to every request."""
    ends_watches: bool = False
    """Whether it ends each watch at once."""
    page: int = 500
    """Most objects of a page."""
    forgets_pages: int = 0
    """Lists whose second page gets 410."""
    hangs: bool = False
    """Whether it keeps every request without an answer."""
    slow_bytes: int = 0
    """Bytes of each piece of an answer; 0 for all at once."""
    sent: list[str] = field(default_factory=list)
    """Queries of all requests."""

    def __post_init__(self) -> None:
        self._objects: dict[str, dict[tuple[str, str], Any]] = {"pods": {}, "inferencepools": {}}
        self._log: list[tuple[int, str, str, str, Any]] = []
        self._changed = asyncio.Condition()
        self._cut: bytes | None = None
        self._generation = 0

    async def put(self, *objects: Any, namespace: str = "default") -> None:
        """Creates or replaces objects."""
        for each in objects:
            kind = "inferencepools" if "selector" in each["spec"] else "pods"
            key = (namespace, each["metadata"]["name"])
            await self._record(kind, "MODIFIED" if key in self._objects[kind] else "ADDED", key, each)

    async def delete(self, name: str, kind: str = "pods", namespace: str = "default") -> None:
        key = (namespace, name)
        await self._record(kind, "DELETED", key, self._objects[kind][key])

    async def terminate(self, name: str, namespace: str = "default") -> None:
        """Begins to delete a pod, which stays until its grace period is over."""
        found = copy.deepcopy(self._objects["pods"][namespace, name])
        found["metadata"]["deletionTimestamp"] = "2026-11-24T10:00:00Z"
        await self._record("pods", "MODIFIED", (namespace, name), found)

    async def bookmark(self, kind: str = "pods", namespace: str = "default") -> None:
        """Sends the current version to every watch."""
        await self._record(kind, "BOOKMARK", (namespace, ""), {"metadata": {}})

    async def forget(self) -> None:
        """Forgets all versions but the current one."""
        async with self._changed:
            self.version += 1
            self.oldest = self.version

    async def cut_watches(self, last: bytes = b"") -> None:
        """Breaks all connections of watches after some bytes."""
        async with self._changed:
            self._cut = last
            self._generation += 1
            self._changed.notify_all()

    async def end_watches(self) -> None:
        """Ends all watches as after their time."""
        async with self._changed:
            self._cut = None
            self._generation += 1
            self._changed.notify_all()

    async def _record(self, kind: str, event: str, key: tuple[str, str], changed: Any) -> None:
        async with self._changed:
            self.version += 1
            named = {"namespace": key[0], "resourceVersion": str(self.version)}
            changed = changed | {"metadata": changed["metadata"] | named}
            if event == "DELETED":
                del self._objects[kind][key]
            elif event != "BOOKMARK":
                self._objects[kind][key] = changed
            self._log.append((self.version, kind, key[0], event, changed))
            self._changed.notify_all()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers a list or a watch."""
        self.sent.append(request.query_string)
        while self.hangs:
            await asyncio.sleep(0.01)
        if self.refuses is not None:
            return web.json_response(failure(*self.refuses), status=self.refuses[0])
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return web.json_response(failure(401, "Unauthorized", "Unauthorized"), status=401)
        kind, namespace = request.path.rpartition("/")[2], request.match_info["namespace"]
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request, kind, namespace)
        return await self._list(request, kind, namespace)

    async def _list(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        begin = request.query.get("continue", "")
        self.lists += not begin
        if begin and self.forgets_pages:
            self.forgets_pages -= 1
            gone = failure(410, "Expired", "The provided continue parameter is too old to display a consistent list")
            return web.json_response(gone, status=410)
        found = [each for each in self._matching(request, kind, namespace) if each["metadata"]["name"] > begin]
        size = min(self.page, int(request.query.get("limit") or self.page))
        metadata = {"resourceVersion": str(self.version)}
        if len(found) > size:
            metadata |= {"continue": found[size - 1]["metadata"]["name"]}
        body = json.dumps({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": found[:size]})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await self._send(response, body.encode())
        return response

    async def _watch(self, request: web.Request, kind: str, namespace: str) -> web.StreamResponse:
        self.watches += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if self.ends_watches:
            return response
        since, generation = int(request.query["resourceVersion"]), self._generation
        if since < self.oldest:
            gone = failure(410, "Expired", f"too old resource version: {since} ({self.oldest})")
            await self._send(response, json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        self.running += 1
        shown = 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                    while generation == self._generation:
                        for number, *where, event, changed in self._log[shown:]:
                            shown += 1
                            if number > since and where == [kind, namespace]:
                                await self._tell(request, response, event, changed)
                        async with self._changed:
                            while generation == self._generation and len(self._log) == shown:
                                await self._changed.wait()
                    if self._cut is not None:
                        await response.write(self._cut)
                        assert request.transport is not None
                        request.transport.abort()
        finally:
            self.running -= 1
        return response

    async def _tell(self, request: web.Request, response: web.StreamResponse, event: str, changed: Any) -> None:
        if not _matches(request, event, changed):
            if event != "MODIFIED":
                return
            event = "DELETED"  # It may have matched before.
        await self._send(response, json.dumps({"type": event, "object": changed}).encode() + b"\n")

    def _matching(self, request: web.Request, kind: str, namespace: str) -> list[Any]:
        found = sorted(self._objects[kind].items())
        return [each for (where, _), each in found if where == namespace and _matches(request, "ADDED", each)]

    async def _send(self, response: web.StreamResponse, content: bytes) -> None:
        step = self.slow_bytes or len(content)
        for begin in range(0, len(content), step):
            await response.write(content[begin : begin + step])
            await asyncio.sleep(0)


def _matches(request: web.Request, event: str, found: Any) -> bool:
    if event == "BOOKMARK":
        return request.query.get("allowWatchBookmarks", "").lower() == "true"
    labels = found["metadata"].get("labels", {})
    wanted = [each.split("=") for each in request.query.get("labelSelector", "").split(",") if each]
    name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in {"", found["metadata"]["name"]}


@asynccontextmanager
async def serving_kube_api(tls: SSLContext | None = None) -> AsyncIterator[KubeApiServer]:
    """Serves the API on a free port of 127.0.0.1 while the context lasts."""
    server = KubeApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", server.answer)
    app.router.add_get(f"/apis/{POOLS}/v1/namespaces/{{namespace}}/inferencepools", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
        yield server
    finally:
        await server.end_watches()
        await runner.cleanup()


def write_kubeconfig(path: Path, server: KubeApiServer, token: str = TOKEN, namespace: str = "default") -> Path:
    """Writes how kubectl would reach the server."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server.url}}],
        "users": [{"name": "me", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me", "namespace": namespace}}],
    }
    path.write_text(json.dumps(config))
    return path


def as_with_kubectl(
    monkeypatch: pytest.MonkeyPatch, directory: Path, server: KubeApiServer, namespace: str = "default"
) -> None:
    """Lets this process find the API server as kubectl does, by a file in a directory."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(directory / "kubeconfig", server, namespace=namespace)))


def as_in_a_pod(
    monkeypatch: pytest.MonkeyPatch, port: int, token: Path, authority: Path, namespace: str = "default"
) -> None:
    """Lets this process find the API server on a port of 127.0.0.1 as the processes of a pod do."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    path = token.with_name("namespace")
    path.write_text(namespace)
    monkeypatch.setattr(api_server, "_NAMESPACE_FILE", path)
