"""Connects to etcd, with TLS and users: aetcd opens plain channels only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aetcd
import grpc
from aetcd import rpc
from aetcd.watcher import Watcher
from kvrouter.net.etcd.access import EtcdAccess

CALL_SECONDS = 3.0
"""Timeout of a call."""
RETRY_SECONDS = (0.25, 2.0)
"""First and longest pause after a failed attempt, seconds."""
_PROBE = b"kvrouter-probe"
_FORBIDDEN = "permission denied"
_CHANNEL_OPTIONS = {
    # Each client has its own connection, and redials soon: gRPC's default back-off grows to two minutes.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Detects a peer that vanished without closing. etcd refuses pings more often than every 5 s.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # Every message would be followed by a ping to measure the connection, and its answer wakes several threads.
    "grpc.http2.bdp_probe": 0,
    # A listing of 10,000 workers takes a few megabytes; the default limit is 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
}


class EtcdAway(Exception):
    """None of the etcd endpoints answers."""


# A call on a stream that has just ended raises InvalidStateError.
AWAY = (EtcdAway, aetcd.ClientError, grpc.aio.AioRpcError, TimeoutError, OSError, asyncio.InvalidStateError)
"""Exceptions of calls while etcd is away. Try again later."""


@asynccontextmanager
async def connect(target: str | EtcdAccess) -> AsyncIterator[aetcd.Client]:
    """Connects to the first live endpoint, while the context lasts. Calls time out after 3 s.

    Args:
        target: Endpoints, separated by commas, or endpoints with user and certificates.

    Raises:
        InvalidEndpoint: an endpoint is malformed.
        EtcdAway: none of the endpoints answers.
        EtcdRefused: etcd refuses the user or the password.
    """
    access = EtcdAccess.of(target)
    errors = []
    for scheme, host, port in access.parsed:
        client = SecureClient(access, scheme, host, port, timeout=CALL_SECONDS, options=_CHANNEL_OPTIONS)
        try:
            try:
                await client.connect()
                await client.get(_PROBE)
            except EtcdRefused:
                raise
            except AWAY as error:
                # A user that may not read the key got an answer all the same.
                if not is_forbidden(error):
                    errors.append(f"{host}:{port}: {reason_of(error)}")
                    continue
            yield client
            return
        finally:
            await client.close()
    raise EtcdAway("; ".join(errors))


def is_forbidden(error: BaseException) -> bool:
    """Returns whether etcd denied the user a permission."""
    return _FORBIDDEN in str(error)


def reason_of(error: BaseException) -> str:
    """Returns what is known of a failed call, in one line."""
    return (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else str(error)


class EtcdRefused(aetcd.ClientError):  # type: ignore[misc]  # aetcd is not typed
    """etcd refused user or password."""


class SecureClient(aetcd.Client):  # type: ignore[misc]  # aetcd is not typed
    """Connects as ``aetcd.Client`` does, with the certificates and the user of an EtcdAccess."""

    def __init__(self, access: EtcdAccess, scheme: str, host: str, port: int, **options: Any) -> None:
        super().__init__(host, port, **options)
        self._access = access
        self._scheme = scheme

    async def connect(self) -> None:
        """Opens the channel and authenticates.

        An expired token makes calls fail with UnauthenticatedError, one of AWAY: the caller connects again, and
        gets another.

        Raises:
            EtcdRefused: the user or the password is wrong.
            grpc.aio.AioRpcError: etcd does not answer.
        """
        if self._connected.is_set():
            return
        target = f"{self._host}:{self._port}"
        options = tuple(self._options.items())
        if self._scheme == "https" and self._access.tls is not None:
            used = self._access.tls.files.current()
            credentials = grpc.ssl_channel_credentials(used.authorities, used.key, used.chain)
            self.channel = grpc.aio.secure_channel(target, credentials, options=options)
        else:
            self.channel = grpc.aio.insecure_channel(target, options=options)
        if self._access.password is not None:
            self.metadata = (("token", await self._authenticate(self._access.password())),)
        self.kvstub = rpc.KVStub(self.channel)
        self.clusterstub = rpc.ClusterStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self.maintenancestub = rpc.MaintenanceStub(self.channel)
        self._watcher = Watcher(rpc.WatchStub(self.channel), timeout=self._timeout, metadata=self.metadata)
        self._connected.set()

    async def _authenticate(self, password: str) -> str:
        request = rpc.AuthenticateRequest(name=self._access.user, password=password)
        try:
            response = await rpc.AuthStub(self.channel).Authenticate(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}:
                raise EtcdRefused(
                    f"etcd refused user {self._access.user!r}: {error.details()}; check the user and its password file"
                ) from None
            raise
        return str(response.token)
