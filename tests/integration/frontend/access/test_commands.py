"""Commands show the API key of --api-key-file."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from ..gateway import MODEL, System
from .keys import Keys

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

NOWHERE = "127.0.0.1:1"


async def run(key_file: Path | None, *arguments: str) -> tuple[int | None, str]:
    """Returns the status of a command, and what it printed."""
    environment = os.environ | ({} if key_file is None else {"KVROUTER_API_KEY_FILE": str(key_file)})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


async def test_top_and_replay_show_the_key_of_a_file(guarded: System, keys: Keys, tmp_path: Path) -> None:
    admin, exposed = tmp_path / "admin.key", tmp_path / "exposed.key"
    for path, mode in ((admin, 0o600), (exposed, 0o644)):
        path.write_text(keys["admin"] + "\n")
        path.chmod(mode)
    top = ("top", "--once", "--scheduler", NOWHERE, "--frontend", guarded.target)
    replays = [
        ("replay", "--requests", "1", "--load", "1000", "--target", target, "--model", MODEL)
        for target in (guarded.target, f"http://{guarded.http}")
    ]
    without, with_key, with_exposed, *replayed = await asyncio.gather(
        run(None, *top),
        run(admin, *top),
        run(exposed, *top),
        *(run(path, *each) for each in replays for path in (None, admin)),
    )
    assert "asks for an API key" in without[1]
    assert "asks for an API key" not in with_key[1]
    assert guarded.target in with_key[1]
    assert with_exposed[0] == 2
    assert "run chmod 600" in with_exposed[1]
    refused, served = replayed[::2], replayed[1::2]
    assert [status for status, _ in refused] == [1, 1]
    assert [status for status, _ in served] == [0, 0], served
    assert not [text for _, text in (without, with_key, with_exposed, *replayed) if keys["admin"] in text]
