"""Entry point of ``python -m kvrouter.devtools.conformance``, which checks a running worker."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from kvrouter.devtools.conformance.options import CheckOptions, parser
from kvrouter.devtools.conformance.results import CheckResult, as_json, as_text


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
    from kvrouter.devtools.conformance.suite import run_checks  # The help need not wait for gRPC.

    results = []
    async for result in run_checks(options):
        results.append(result)
        if not is_quiet:
            _say(as_text([result]))
    return results


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
