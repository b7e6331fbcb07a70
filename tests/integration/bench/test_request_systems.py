"""``make bench-request`` in its shortest form: its systems start, serve its load, and their CPU is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk, the load generator, is not installed")
@pytest.mark.parametrize("name", [pytest.param("one process", marks=pytest.mark.full), "split"])
async def test_a_system_serves_the_load_of_the_benchmark(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench/request"))
    from load import Work  # scripts in a folder, no package
    from samples import Samples
    from systems import Engines, running_systems
    from traffic import compare

    samples = Samples()
    works = {"unary": Work(0, 64, 2), "streamed": Work(32, 32, 2, output=8), "text": Work(32, 32, 2, is_text=True)}
    async with running_systems([name], Engines(workers=2, has_text=True), tmp_path) as systems:
        await compare(samples, works, systems, rounds=1, seconds=1, say=lambda _: None)
    for row in works:
        assert samples.median(row, name, "failed") == 0
        assert (samples.median(row, name, "per_second") or 0) > 0
        assert (samples.median(row, name, "cpu_us") or 0) > 0
        assert (samples.median(row, name, "engine_cpu_us") or 0) > 0
