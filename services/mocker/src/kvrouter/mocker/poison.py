"""A token that harms the engine which runs it, as real engines have prompts that they do not survive."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Literal

from kvrouter.mocker.engine.types import EngineRequest, pack_tokens

PoisonEffect = Literal["die", "die-after-output", "hang"]
_TOKEN_BYTES = 4


class Poison:
    """Ends or freezes this process when it runs a prompt with the token."""

    def __init__(self, token_id: int, effect: PoisonEffect) -> None:
        self._token = pack_tokens([token_id])
        self._effect = effect
        self._running: set[str] = set()

    def submitted(self, request: EngineRequest) -> None:
        """Takes effect if the request has the token, or notes the request for its output."""
        prompt = request.prompt
        tokens = (prompt[at : at + _TOKEN_BYTES] for at in range(0, len(prompt), _TOKEN_BYTES))
        if self._token not in tokens:
            return
        if self._effect == "die-after-output":
            self._running.add(request.request_id)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self._effect == "hang" else signal.SIGKILL)

    def goes_on(self, request_ids: Iterable[str]) -> None:
        """Takes effect if one of the requests, which have output and would now have more, has the token."""
        if not self._running.isdisjoint(request_ids):
            os.kill(os.getpid(), signal.SIGKILL)
