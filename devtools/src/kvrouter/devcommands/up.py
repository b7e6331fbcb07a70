"""``kvrouter up``: runs a whole system until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

from kvrouter import core
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.running import RunningSystem, announced
from kvrouter.devtools.system.certificates import PEER_DOMAIN
from kvrouter.devtools.system.ports import DEFAULT_HTTP_PORT
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack, why_not_free
from rich.console import Console
from rich.table import Table

_MEAN_OUTPUT_TOKENS = 128
"""Mean length of outputs without max_tokens or with a large one, as by default of the simulated engine."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of the system; StackOptions documents the fields."""

    workers: int
    prefill: int
    blocks: int
    block_size: int
    clock: float
    mode: str
    http_port: int
    grpc_port: int
    logs: Path
    secure: bool = False
    scheduler_config: Path | None = None


def choose_port(asked: int | None, default: int) -> int:
    """Returns the requested port, by default the default one, or 0 (a free one) if that is taken.

    Raises:
        WrongUsage: the requested port cannot be listened on.
    """
    if asked is not None and (reason := why_not_free(asked)):
        raise WrongUsage(f"port {asked}: {reason}")
    return asked if asked is not None else default if not why_not_free(default) else 0


async def up(options: UpOptions, console: Console) -> None:
    """Starts the system, prints its addresses, and runs until cancelled.

    Raises:
        ProcessDied, StackFailed, StartFailed, BinaryMissing: the system did not become ready, or did not stay up.
    """
    if core.IMPLEMENTATION != "native" and core.REQUESTED != "reference":
        console.print(core.MISSING_NATIVE, style="yellow", highlight=False)
    options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvrouter-") as directory:
        stack_options = StackOptions(
            directory=Path(directory),
            logs=options.logs,
            workers=options.workers,
            prefill=options.prefill,
            blocks=options.blocks,
            block_size=options.block_size,
            clock=options.clock,
            mode=options.mode,
            http_port=options.http_port,
            grpc_port=options.grpc_port,
            restarts=True,
            mean_output_tokens=_MEAN_OUTPUT_TOKENS,
            has_text=True,
            secure=options.secure,
            scheduler_config=options.scheduler_config,
        )
        async with running_stack(stack_options, lambda words: console.print(f"{words} ...")) as stack:
            system = _running(stack)
            with announced(system) as name:
                _describe(stack, console, "" if name == system.name else f" --run {name}")
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    console.print("\nstopping ...")


def _running(stack: Stack) -> RunningSystem:
    system = RunningSystem(
        "up", stack.frontend, stack.scheduler, stack.indexer, stack.etcd.endpoint, stack.options.namespace
    )
    if stack.credentials is None:
        return system
    admin = stack.credentials.identities["admin"]
    return replace(
        system,
        tls_ca_file=str(admin.certificate.authority),
        tls_cert_file=str(admin.certificate.cert),
        tls_key_file=str(admin.certificate.key),
        tls_peer_domain=PEER_DOMAIN,
        etcd_user=admin.account.name,
        etcd_password_file=str(admin.password),
    )


def _describe(stack: Stack, console: Console, run: str) -> None:
    """Prints addresses and commands to paste, with the option that chooses this system."""
    options = stack.options
    if not stack.http.endswith(f":{DEFAULT_HTTP_PORT}") and options.http_port == 0:
        console.print(f"port {DEFAULT_HTTP_PORT} is taken: HTTP is on another one", highlight=False)
    scheme = "http" if stack.credentials is None else "https"
    table = Table(box=None, pad_edge=False, show_header=False)
    for what, where in (
        ("HTTP API", f"{scheme}://{stack.http}"),
        ("Web page", f"{scheme}://{stack.http}/ui/"),
        ("Frontend, gRPC", stack.frontend),
        ("Scheduler, gRPC", stack.scheduler),
        ("Indexer, gRPC", stack.indexer),
        ("NATS", stack.nats.url),
        ("etcd", stack.etcd.endpoint),
        (f"{_fleet(options)}, metrics of each", ", ".join(stack.worker_metrics)),
        ("logs", str(options.logs)),
    ):
        table.add_row(what, where)
    console.print()
    console.print(table)
    console.print("\nA first request, in another terminal; twice, to find its prompt in a cache:\n", soft_wrap=True)
    request = first_request(f"{_authority_of_curl(stack)}{scheme}://{stack.http}", options.model)
    console.print(indent(request, "  "), highlight=False, soft_wrap=True, markup=False)
    console.print("\nWhy it went there:\n")
    console.print(f"  {_own_command()} explain{run}", highlight=False, soft_wrap=True)
    console.print("\nA workload, with a summary:\n")
    console.print(
        f"  {_own_command()} replay documents{run} --clock {options.clock:g} --requests 100",
        highlight=False,
        soft_wrap=True,
    )
    console.print("\nLoad, cache hits and decisions as they happen:\n")
    console.print(f"  {_own_command()} top{run}", highlight=False, soft_wrap=True)
    console.print("\nCtrl-C stops everything.")


def first_request(target: str, model: str = "mock-model") -> str:
    """Returns a command that sends a chat with a prompt of many blocks.

    Args:
        target: URL of the HTTP API, after options of curl.
        model: The model.
    """
    return (
        f"curl -si {target}/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"""  -d '{{"model": "{model}", "max_tokens": 8, "messages": [{{"role": "user",\n"""
        """       "content": "Add them up: '"$(seq -s ' ' 300)"'"}]}'"""
    )


def _authority_of_curl(stack: Stack) -> str:
    return "" if stack.credentials is None else f"--cacert {stack.credentials.authority.certificate_path} "


def _fleet(options: StackOptions) -> str:
    if options.prefill:
        return f"{options.workers} decode and {options.prefill} prefill workers"
    return f"{options.workers} workers"


def _own_command() -> str:
    """Returns the path of this command from this folder, for terminals without an activated environment."""
    command = Path(sys.executable).with_name("kvrouter")
    here = Path.cwd()
    return str(command.relative_to(here) if command.is_relative_to(here) else command)
