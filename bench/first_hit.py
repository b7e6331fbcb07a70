"""Measures the time from an empty virtual environment to the first request with a KV hit, with two commands.

    make wheels
    .venv/bin/pip wheel -c constraints.txt --find-links dist -w dist kvrouter
    unshare -rn .venv/bin/python bench/first_hit.py --wheels dist

Two simulated vLLM servers run before the clock starts. Then a user without root and without a compiler installs the
wheels (``pip install``), starts the router (``kvrouter serve --engine …``), and repeats a request until an engine
reports cached tokens. In a network namespace of its own, as above, there is no network but the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import socket
import struct
import tempfile
import time
import venv
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from restart import FAST, answers, engine, until, until_answered

PROMPT = list(range(1, 4097))
NOBODY = 65534
_SIOCSIFFLAGS, _IFF_UP_RUNNING_LOOPBACK = 0x8914, 0x49


def raise_loopback() -> bool:
    """Turns the loopback of a new network namespace on. Returns whether there is no other network."""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not others:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING_LOOPBACK))
    return not others


def newcomer(directory: Path) -> dict[str, str]:
    """Returns the environment of a user with nothing but the system's own programs."""
    return {"PATH": "/usr/bin:/bin", "HOME": str(directory), "XDG_RUNTIME_DIR": str(directory)}


def as_newcomer(directory: Path, *command: str) -> tuple[str, ...]:
    """Returns a command that runs another without the rights of root, if this process has them on the machine."""
    if os.getuid() or not _may_change_user():
        return command
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command)


def _may_change_user() -> bool:
    # In a user namespace root is mapped to one user, which has no rights outside of it.
    mapped = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
    return len(mapped) == 3 and int(mapped[2]) > NOBODY


async def measure(wheels: Path, directory: Path) -> None:
    """Prints the times."""
    alone = raise_loopback()
    environment = directory / "environment"
    venv.create(environment, with_pip=True)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        logs = Path(await asyncio.to_thread(tempfile.mkdtemp))
        urls = []
        for number in range(2):
            url, process = await engine(logs, f"engine-{number}", "--num-blocks", "10000", *FAST)
            stack.push_async_callback(process.stop, 20)
            await until_answered(session, f"{url}/health")
            urls.append(url)
        program = environment / "bin"
        began = time.monotonic()
        pip = (str(program / "pip"), "install", "-q", "--no-index", "--find-links", str(wheels), "kvrouter")
        installing = await asyncio.create_subprocess_exec(
            *as_newcomer(directory, *pip), env=newcomer(directory), cwd=directory
        )
        if await installing.wait():
            raise SystemExit("the installation failed")
        installed = time.monotonic()
        http, ops, grpc = (f"127.0.0.1:{port}" for port in free_ports(3))
        engines = [argument for url in urls for argument in ("--engine", url)]
        addresses = ("--port", http.rpartition(":")[2], "--http-bind", ops, "--bind", grpc)
        serve = as_newcomer(directory, str(program / "kvrouter"), "serve", *engines, *addresses)
        router = await ManagedProcess.start(Command("serve", serve, newcomer(directory)), logs)
        stack.push_async_callback(router.stop, 20)
        await until(lambda: answers(session, f"http://{ops}/ready"))
        ready = time.monotonic()
        requests = 0

        async def hits() -> bool:
            nonlocal requests
            requests += 1
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
            async with session.post(f"http://{http}/v1/completions", json=body) as response:
                answer = await response.json()
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            return bool(details.get("cached_tokens"))

        await until(hits)
        hit = time.monotonic()
    network = "no network" if alone else "with a network"
    print(
        f"{hit - began:.1f} s to a hit, the request number {requests}: {installed - began:.1f} s to install, "
        f"{ready - installed:.1f} s to start, {hit - ready:.1f} s to the hit ({network})"
    )


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="Folder with the wheels of all distributions.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(options.wheels.resolve(), Path(directory)))


if __name__ == "__main__":
    main()
