"""Checks aborts and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from kvrouter.core import Scope
from kvrouter.devtools.conformance.cache import CacheProbe
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import (
    CLIENT_ERRORS,
    Output,
    WorkerUnderTest,
    add_piece,
    read_output,
)
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest

_LONG_OUTPUT = 100_000
_MUCH_OUTPUT = 256
"""Tokens after an ignored abort, at least, if the request ends by itself."""
_NO_ADAPTER = Scope(lora_name="kvrouter-check-unknown-adapter")


async def check_abort(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks Abort: it must end a running request and free its resources."""
    _check_served(probe)
    request = _long_request(worker)
    async with worker.started(request) as call:
        output = await _begun(call)
        busy = await worker.load()
        if output.finish_reason:
            raise _too_short()
        aborted = await worker.abort([request.request_id])
        try:
            output = await read_output(call)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED):
                raise _went_on(error.code().name) from None
        else:
            if output.finish_reason == FinishReason.FINISH_REASON_LENGTH and len(output.token_ids) < _MUCH_OUTPUT:
                raise _too_short()
            if output.finish_reason != FinishReason.FINISH_REASON_ABORT:
                raise _went_on(FinishReason.Name(output.finish_reason))
    if aborted != 1:
        raise CheckFailed(
            expected="aborted of 1 from Abort",
            received=str(aborted),
            advice="return the number of the named requests that were running.",
        )
    return await _check_freed(worker, probe.idle, busy)


async def check_disconnect(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks a disconnect: it must end the caller's request and free its resources."""
    _check_served(probe)
    async with worker.started(_long_request(worker)) as call:
        output = await _begun(call)
        if output.finish_reason:
            raise _too_short()
        busy = await worker.load()
    return await _check_freed(worker, probe.idle, busy)


def _check_served(probe: CacheProbe) -> None:
    if probe.before is None:
        raise CheckSkipped("the first request was not served")


def _long_request(worker: WorkerUnderTest) -> WorkerServiceGenerateRequest:
    # The output of some engines is no longer than the prompt.
    prompt = worker.prompt(worker.options.prompt_blocks * worker.block_size)
    most = worker.max_model_len - len(prompt) if worker.max_model_len else _LONG_OUTPUT
    return worker.request(prompt, max_tokens=max(1, min(most, _LONG_OUTPUT)))


async def _begun(call: Any) -> Output:
    """Reads an output up to its first tokens, or to its end."""
    output = Output()
    async for response in call:
        add_piece(output, response)
        if output.token_ids:
            break
    return output


def _went_on(end: str) -> CheckFailed:
    return CheckFailed(
        expected="the output to end with finish_reason ABORT",
        received=end,
        advice="let abort() stop the request in the engine, and end it with FINISH_REASON_ABORT.",
    )


def _too_short() -> CheckSkipped:
    return CheckSkipped("the request ended before it could be aborted: the engine generates too few tokens")


async def _check_freed(worker: WorkerUnderTest, idle: LoadReport | None, busy: LoadReport | None) -> str:
    """Waits until the load is as before the request."""
    if idle is None or busy is None or busy.running_requests <= idle.running_requests:
        return "ended; the load does not show whether the engine freed the request"

    async def freed() -> bool | None:
        load = await worker.load()
        if load is None or load.running_requests > idle.running_requests or load.active_blocks > idle.active_blocks:
            return None
        return True

    if await worker.until(freed):
        return "ended, and its load is gone"
    load = await worker.load() or LoadReport()
    raise CheckFailed(
        expected=f"{idle.running_requests} running requests and {idle.active_blocks} active blocks, as before",
        received=f"{load.running_requests} running requests and {load.active_blocks} active blocks "
        f"{worker.options.seconds:g} s after the end",
        advice="let abort() stop the request in the engine and free its blocks; it is also called when a caller "
        "disconnects. Check an idle worker.",
    )


async def check_empty_prompt(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the refusal of a prompt without tokens."""
    return await _check_refused(worker, probe, "a prompt without tokens", lambda: worker.request([]))


async def check_no_output(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the refusal of a request for no tokens."""
    return await _check_refused(worker, probe, "max_tokens of 0", lambda: worker.request([1], max_tokens=0))


async def check_unknown_rank(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the refusal of a request to an unknown rank."""

    def request() -> WorkerServiceGenerateRequest:
        made = worker.request(worker.prompt(worker.block_size))
        made.dp_rank = (1 << 32) - 1
        return made

    return await _check_refused(worker, probe, "a rank that the worker does not have", request)


async def check_long_prompt(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the refusal of a prompt beyond the model's length."""
    if not worker.max_model_len:
        raise CheckSkipped("needs --max-model-len, or a registration that has it (--etcd)")
    tokens = worker.max_model_len + 1
    return await _check_refused(
        worker, probe, f"a prompt of {tokens} tokens", lambda: worker.request(worker.prompt(tokens))
    )


async def check_unknown_adapter(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the refusal of an unknown LoRA adapter, which the base model must not serve."""
    if worker.options.any_adapter:
        raise CheckSkipped("--any-adapter: the engine serves adapters of any name")
    prompt = worker.prompt(worker.block_size)
    return await _check_refused(
        worker, probe, "an unknown LoRA adapter", lambda: worker.request(prompt, scope=_NO_ADAPTER)
    )


async def _check_refused(
    worker: WorkerUnderTest, probe: CacheProbe, what: str, request: Callable[[], WorkerServiceGenerateRequest]
) -> str:
    _check_served(probe)
    expected = f"INVALID_ARGUMENT, NOT_FOUND or OUT_OF_RANGE for {what}"
    try:
        output = await worker.generate(request())
    except grpc.aio.AioRpcError as error:
        if error.code() in CLIENT_ERRORS:
            return f"{error.code().name}: {error.details()}"
        raise CheckFailed(
            expected=expected,
            received=f"{error.code().name}: {error.details()}",
            advice="raise RequestRefused with the code of a client's error: others count against the worker, and the "
            "request is tried elsewhere.",
        ) from None
    raise CheckFailed(
        expected=expected,
        received=f"success with {len(output.token_ids)} tokens and {FinishReason.Name(output.finish_reason)}",
        advice="raise RequestRefused before the first output: a client takes this for an answer.",
    )
