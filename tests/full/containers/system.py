"""A compose project of the deployment files, with what systemd would do for its health checks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kvrouter.devtools.system.ports import free_ports

from .engine import inspect, run

DEPLOY = Path(__file__).parents[3] / "deploy"
SECONDS = 180
PORTS = """
services:
  frontend:
    ports: !override ["127.0.0.1:{http}:8000", "127.0.0.1:{grpc}:7000"]
"""


class System:
    """Containers by the names that their services have in the compose files."""

    def __init__(self, program: str, folder: Path, files: Sequence[str], environment: Mapping[str, str]) -> None:
        self.http, grpc = free_ports(2)
        ports = folder / "ports.yaml"
        ports.write_text(PORTS.format(http=self.http, grpc=grpc))
        self.project = f"kvrouter-{os.getpid()}-{self.http}"
        named = [word for file in (*files, str(ports)) for word in ("-f", file)]
        self.command = (program, "--project-directory", files[0].rpartition("/")[0], "-p", self.project, *named)
        self.environment = {**os.environ, **environment}
        self.first_healthy: dict[str, str] = {}

    async def compose(self, *arguments: str) -> str:
        return await asyncio.to_thread(run, *self.command, *arguments, env=self.environment)

    def state(self, service: str) -> dict[str, Any]:
        return dict(inspect(self.container(service))["State"])

    def process_status(self, service: str) -> str:
        """Returns what the kernel says of a container's first process: its users and capabilities."""
        return Path(f"/proc/{self.state(service)['Pid']}/status").read_text()

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    async def running(self) -> list[str]:
        """Returns the services that run now."""
        output = await asyncio.to_thread(
            run, "podman", "ps", "--format", "json", "--filter", f"label=com.docker.compose.project={self.project}"
        )
        return [each["Labels"]["com.docker.compose.service"] for each in json.loads(output)]

    async def check_health(self) -> None:
        """Runs each container's health check every second, as its timer would at its own interval."""
        while True:
            await asyncio.gather(*map(self._check, await self.running()))
            await asyncio.sleep(1)

    async def _check(self, service: str) -> None:
        command = ("podman", "healthcheck", "run", self.container(service))
        output = asyncio.subprocess.DEVNULL
        checking = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        if await checking.wait() == 0 and service not in self.first_healthy:
            log = (await asyncio.to_thread(self.state, service))["Health"]["Log"]
            self.first_healthy[service] = next(each["End"] for each in log if each["ExitCode"] == 0)

    async def healthy(self, *services: str) -> None:
        """Waits until the health checks of these services succeed.

        Raises:
            AssertionError: one did not in time; its log is the message.
        """
        for service in services:
            try:
                async with asyncio.timeout(SECONDS):
                    while (await asyncio.to_thread(self.state, service))["Health"]["Status"] != "healthy":
                        await asyncio.sleep(0.2)
            except TimeoutError:
                raise AssertionError(await self.compose("logs", service)) from None

    async def stop(self, service: str) -> dict[str, Any]:
        """Stops a container as an operator would, and returns the state that it ended in."""
        await self.compose("stop", service)
        return await asyncio.to_thread(self.state, service)


@asynccontextmanager
async def started(
    program: str, folder: Path, *files: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[System]:
    """Starts what the compose files say, waits until all of it is healthy, and removes it in the end."""
    system = System(program, folder, files, environment or {})
    checks = asyncio.create_task(system.check_health())
    try:
        await system.compose("up", "--detach", "--no-build")
        await system.healthy(*await system.running())
        yield system
    finally:
        checks.cancel()
        with suppress(asyncio.CancelledError):
            await checks
        await system.compose("down", "--timeout", "5")
