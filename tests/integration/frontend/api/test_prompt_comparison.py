"""The tokens of probe chats are compared with those of engines, and a difference is reported everywhere."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from kvrouter.frontend.proxy.prompt_comparison import PROBES
from kvrouter.frontend.web.problems import problems
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.overview.ranks import HitWindow, rank_notes
from kvrouter.runtime.overview.system import FrontendView, SchedulerView, System as SystemState
from kvrouter.v1.frontend_pb2 import GetWorkerHealthRequest, GetWorkerHealthResponse, WorkerHealth
from kvrouter.v1.scheduler_pb2 import ComponentStatus, GetStatusResponse, RankStatus

from ....byte_tokenizer import write_byte_tokenizer
from ....waiting import until
from ...sidecar.rig import EngineServer, beside, sglang, vllm, write_engine_keys
from ..gateway import MODEL, System, running_system

KEY = "engine-secret"


async def health(system: System) -> WorkerHealth:
    answer = await system.frontend.get_worker_health(GetWorkerHealthRequest(), deadline=Deadline.after(5))
    (worker,) = answer.workers
    return worker


def differences(system: System) -> float | None:
    return system.runtime.registry.get_sample_value("kvrouter_frontend_prompt_differences")


@pytest.mark.parametrize("server", [vllm, pytest.param(sglang, marks=pytest.mark.full)])
async def test_a_template_that_is_not_the_engines_is_reported(
    server: Callable[..., EngineServer], tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    directory = write_byte_tokenizer(tmp_path / "tokenizer")
    keys = write_engine_keys(tmp_path / "keys.toml", workers=KEY)
    engine = server(model=MODEL, api_key=KEY)
    config = directory / "tokenizer_config.json"
    for template in (config.read_text(), config.read_text().replace("<|assistant|>", "<|model|>")):
        config.write_text(template)
        options = {"tokenizers": {MODEL: str(directory)}, "engine_keys_file": keys}
        with structlog.testing.capture_logs() as logs:
            async with (
                running_system(nats_url, etcd_endpoint, namespace, **options) as system,
                engine.started(),
                beside(namespace, etcd_endpoint, nats_url, engine.url, worker_id=1, engine_keys_file=keys) as sidecar,
            ):
                await sidecar.ready()
                await until(lambda: any(line["event"].startswith("prompts.") for line in logs))
                worker = await health(system)
                if "<|assistant|>" in template:
                    assert [line["probes"] for line in logs if line["event"] == "prompts.compared"] == [len(PROBES)]
                    assert (worker.prompt_difference, differences(system)) == ("", 0)
                else:
                    (line,) = (line for line in logs if line["event"] == "prompts.differ")
                    position = line["position"]
                    assert (line["probe"], line["engines_token"], line["own_token"]) == ("a chat", "97", "109")
                    assert worker.prompt_difference == f"a chat: token {position} is 97 at the engine and 109 here"
                    assert differences(system) == 1
                    check_overviews(worker)


def check_overviews(worker: WorkerHealth) -> None:
    """Checks the list of problems and the notes of ``top``."""
    frontend = FrontendView("f:1", GetWorkerHealthResponse(workers=[worker]))
    status = GetStatusResponse(ready=True, components=[ComponentStatus(component=worker.component)])
    state = SystemState(datetime.now(tz=UTC), [SchedulerView("s:1", status)], frontends=[frontend])
    assert any(worker.prompt_difference in each.what for each in problems(state, HitWindow(60)))
    notes = rank_notes(RankStatus(registered=True), None, [worker], is_indexed=False)
    assert [worker.prompt_difference in each.what for each in notes] == [True]
