"""Options of the conformance kit."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvrouter.v1.names import ComponentName


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of a check, by the author of the engine."""

    worker: str
    """Address of its WorkerService, host:port."""
    dp_rank: int = 0
    """Rank whose cache is checked."""
    component: ComponentName | None = None
    etcd: str = ""
    """``host:port`` of etcd; empty to omit the checks with it."""
    nats: str = ""
    """URL of NATS; empty to omit the checks with it."""
    max_model_len: int = 0
    """Maximum number of prompt and output tokens together; 0 for the registered one."""
    any_adapter: bool = False
    """Whether the engine serves LoRA adapters of any name."""
    restart_command: str = ""
    """Shell command to restart the worker; empty to omit the check."""
    prompt_blocks: int = 4
    """Full blocks of a prompt."""
    largest_token: int = 999
    """Prompts have random tokens from 1 to this one."""
    seconds: float = 30.0
    """Longest wait for an expected effect, seconds."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    made = argparse.ArgumentParser(
        prog="python -m kvrouter.devtools.conformance",
        description="Checks that a worker does what the contract says. It should have no other traffic meanwhile.",
    )
    known = CheckOptions(worker="")
    made.add_argument("--worker", required=True, help="address of its WorkerService, host:port")
    made.add_argument("--dp-rank", type=int, default=known.dp_rank, help="rank to check; default 0")
    made.add_argument("--component", type=ComponentName.parse, help="namespace/component that the worker joined")
    made.add_argument("--etcd", default=known.etcd, help="host:port of etcd, to check the registration")
    made.add_argument("--nats", default=known.nats, help="URL of NATS, to check what is published")
    made.add_argument(
        "--max-model-len", type=int, default=known.max_model_len, help="longest sequence; by default the registered one"
    )
    made.add_argument("--any-adapter", action="store_true", help="the engine serves LoRA adapters of any name")
    made.add_argument("--restart-command", default=known.restart_command, help="shell command that restarts it")
    made.add_argument(
        "--prompt-blocks", type=_positive, default=known.prompt_blocks, help="full blocks of a prompt; default 4"
    )
    made.add_argument(
        "--largest-token",
        type=_positive,
        default=known.largest_token,
        help="prompts have random tokens up to this one; default 999",
    )
    made.add_argument(
        "--seconds", type=float, default=known.seconds, help="longest time to wait for anything; default 30"
    )
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("expected 1 or more")
    return number
