"""What the engines' side of a token costs besides sending it: runs ``engine_alone.py`` beside NATS and etcd."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from load import Work
from systems import Engines, mocker_options, running_servers

SCRIPT = Path(__file__).with_name("engine_alone.py")


async def engines_alone(directory: Path, work: Work, engines: Engines, seconds: float) -> dict[str, float]:
    """Returns what mock workers spend on streamed work if they send nothing: ``cpu_us`` per token."""
    async with running_servers(directory) as servers:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), "--etcd", servers.etcd.endpoint, "--nats", servers.nats.url),
            *("--concurrency", str(work.concurrency), "--prefix", str(work.prefix), "--suffix", str(work.suffix)),
            *("--output", str(work.output), "--seconds", str(seconds), *mocker_options(engines)),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
    measured: dict[str, float] = json.loads(said.splitlines()[-1])
    return measured
