"""Generate over gRPC takes a text, and returns text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import AvoidedWorker, RoutingConstraints, TokenIds
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, SamplingOptions, StopConditions

from ....hostile_worker import HostileWorker, piece, registered_beside
from ....waiting import until
from ..gateway import MODEL, System, running_system


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> AsyncIterator[System]:
    write_small_tokenizer(tmp_path)
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers={MODEL: str(tmp_path)}) as running:
        await running.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
        await until(lambda: running.frontend.models.has_text(MODEL))
        yield running


async def outputs(
    system: System, *, stop: tuple[str, ...] = (), tokens: int = 40, **fields: Any
) -> list[GenerateOutput]:
    request = FrontendServiceGenerateRequest(
        model=MODEL,
        request_id="same",
        stop_conditions=StopConditions(max_tokens=tokens, stop=stop),
        sampling_options=SamplingOptions(seed=7),
        **fields,
    )
    return [piece.output async for piece in system.client.generate(request, deadline=Deadline.after(30))]


async def test_a_text_is_answered_with_tokens_or_text(system: System) -> None:
    tokens = await outputs(system, prompt_text="the end of the story")
    assert not any(piece.text for piece in tokens)
    texts = await outputs(system, prompt_text="the end of the story", return_text=True)
    assert [list(piece.token_ids) for piece in texts] == [list(piece.token_ids) for piece in tokens]
    whole = "".join(piece.text for piece in texts)
    assert whole
    stopped = await outputs(system, prompt_text="the end of the story", return_text=True, stop=(whole[20:25],))
    assert "".join(piece.text for piece in stopped) == whole[: whole.index(whole[20:25])]
    assert stopped[-1].finish_reason == FinishReason.FINISH_REASON_STOP
    await system.until_idle()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_text": "1 " * 20_000}, "prompt_text"),
        ({"token_ids": TokenIds(ids=[1]), "stop": ("x",)}, "stop_conditions.stop"),
        ({"token_ids": TokenIds(ids=[1]), "stop": ("",), "return_text": True}, "stop_conditions.stop"),
    ],
)
async def test_a_bad_text_is_refused_with_its_field(system: System, fields: dict[str, Any], field: str) -> None:
    with pytest.raises((BadRequest, PromptTooLong)) as caught:
        await outputs(system, **fields)
    assert caught.value.info.field == field
    assert await system.booked() == [0]


@pytest.mark.parametrize("stops", [False, True])
async def test_text_and_stop_strings_continue_over_the_failure_of_a_worker(system: System, stops: bool) -> None:
    async def fail_in_the_middle(context: Any) -> None:
        for token in tokens[:15]:
            await context.write(piece(token))
        context.set_code(grpc.StatusCode.UNAVAILABLE)

    undisturbed = await outputs(system, prompt_text="the end of the story", return_text=True)
    tokens = [token for each in undisturbed for token in each.token_ids]
    before = "".join(each.text for each in undisturbed[:15])
    whole = "".join(each.text for each in undisturbed)
    over_the_seam = whole[len(before) - 6 : len(before) + 6]
    stop = (over_the_seam,) if stops else ()
    view = next(iter(system.runtime.directory.components.values()))
    async with (
        HostileWorker(fail_in_the_middle).serving() as worker,
        registered_beside(view, system.where["etcd"], 2, worker.endpoint),
    ):
        await system.until_candidate(2)
        first = RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=1)])
        sent = {"prompt_text": "the end of the story", "return_text": True, "constraints": first}
        received = await outputs(system, stop=stop, **sent)
        assert worker.calls == 1
    text = "".join(each.text for each in received)
    assert text == (whole[: whole.index(over_the_seam)] if stops else whole)
    expected = FinishReason.FINISH_REASON_STOP if stops else FinishReason.FINISH_REASON_LENGTH
    assert received[-1].finish_reason == expected
    await system.until_idle()
