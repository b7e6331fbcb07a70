"""Log probabilities of a simulated engine. They are constant: nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable

from kvrouter.publisher.serving.outputs import RequestOutput

_LOGPROB = -0.5
_TOKEN_IDS = 1 << 32


class Logprobs:
    """Adds log probabilities to the outputs of requests that want some."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def begin(self, request_id: str, number: int) -> None:
        """Starts a request that wants so many for each token."""
        if number:
            self._numbers[request_id] = number

    def forget(self, request_ids: Iterable[str]) -> None:
        """Ends requests that were aborted."""
        for request_id in request_ids:
            self._numbers.pop(request_id, None)

    def add_to(self, output: RequestOutput) -> None:
        """Adds those of an output's tokens. A token is the most likely one; the ids after it are the next likely."""
        number = self._numbers.get(output.request_id)
        if number is not None and output.details is not None:
            for token in output.token_ids:
                output.details.logprobs.append(_LOGPROB)
                if number > 1:
                    places = range(number - 1)
                    top = output.details.top_logprobs.add(token_ids=[(token + place) % _TOKEN_IDS for place in places])
                    top.logprobs.extend(_LOGPROB - place for place in places)
        if output.finish_reason:
            self._numbers.pop(output.request_id, None)
