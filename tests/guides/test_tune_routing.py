"""The search for settings in the guide to routing, executed on a small recording."""

from __future__ import annotations

from pathlib import Path

from kvrouter.simulator.workloads import traces
from kvrouter.simulator.workloads.generators import generate

from .commands import Guide


async def test_the_command_writes_options(tmp_path: Path) -> None:
    (tmp_path / "traffic.jsonl").write_text("".join(traces.lines(generate("prompts", 40))))
    (tmp_path / "router.toml").write_text('[scheduler]\nrouter_mode = "round-robin"\n')
    small = {"--workers 16": "--workers 2 --no-splits --seeds 1 --processes 1"}
    with Guide("docs/guides/tune-routing.md", directory=tmp_path, replaced=small) as guide:
        shown = await guide.run("kvrouter tune")
    assert "held-out part: present, round-robin" in shown
    assert (tmp_path / "tuned.toml").read_text().startswith("# kvrouter tune: ")
