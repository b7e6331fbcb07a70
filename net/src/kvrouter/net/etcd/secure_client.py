"""The etcd client with TLS and users: aetcd opens plain channels only."""

from __future__ import annotations

from typing import Any

import aetcd
import grpc
from aetcd import rpc
from aetcd.watcher import Watcher
from kvrouter.net.etcd.access import EtcdAccess


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
