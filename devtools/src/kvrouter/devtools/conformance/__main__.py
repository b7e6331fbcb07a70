"""Entry point of ``python -m kvrouter.devtools.conformance``, which checks a running worker."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from kvrouter.devtools.conformance.results import CheckResult, as_json, as_text
from kvrouter.devtools.conformance.suite import run_checks
from kvrouter.devtools.conformance.worker_under_test import CheckOptions
from kvrouter.v1.names import ComponentName


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks a worker; returns 1 if a check failed, otherwise 0."""
    parsed = parser().parse_args(arguments)
    as_object = parsed.__dict__.pop("json")
    options = CheckOptions(**vars(parsed))
    results = asyncio.run(_run(options, is_quiet=as_object))
    if as_object:
        _say(json.dumps(as_json(options.worker, results), indent=2))
    else:
        counted = [
            f"{sum(each.outcome == outcome for each in results)} {outcome}"
            for outcome in ("passed", "failed", "skipped")
        ]
        _say(", ".join(counted))
    return int(any(each.outcome == "failed" for each in results))


async def _run(options: CheckOptions, *, is_quiet: bool) -> list[CheckResult]:
    results = []
    async for result in run_checks(options):
        results.append(result)
        if not is_quiet:
            _say(as_text([result]))
    return results


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


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


if __name__ == "__main__":
    sys.exit(main())
