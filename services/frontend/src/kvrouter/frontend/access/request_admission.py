"""Admits requests, of the APIs and of gateways alike, within the limits of their callers and of this Frontend.

A request takes its part of its caller's limits as soon as its headers are known (``Access``), with an estimate of its
tokens. Here it is admitted once its prompt is known: its tokens replace the estimate, and the bounds of this Frontend
count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.body_room import BodyRoom
from kvrouter.frontend.access.caller import current_caller, current_grant
from kvrouter.frontend.access.overload_bounds import CountedRequest, OverloadBounds
from kvrouter.frontend.access.quotas import Grant
from kvrouter.runtime.discovery.directory import ComponentView


@dataclass(slots=True, eq=False)
class AdmittedRequest:
    """A request counting until it is ended. End it once."""

    grant: Grant | None
    """What it takes of its caller's limits."""
    counted: CountedRequest | None
    """What it takes of this Frontend's bounds."""
    prompt_tokens: int
    max_output_tokens: int

    def end(self, output_tokens: int | None, *, sent: bool, prompt_tokens: int | None = None) -> None:
        """Ends the request.

        Args:
            output_tokens: Tokens of its output; None if their number is not known, and the maximum counts.
            sent: Whether a worker had its prompt, which is then charged whether there was output or not.
            prompt_tokens: Tokens of its prompt as its engine counted them, instead of an estimate; None to keep that.
        """
        if self.grant is not None:
            charged = 0
            if sent or output_tokens:
                charged = self.prompt_tokens if prompt_tokens is None else max(0, prompt_tokens)
            unused_output = 0 if output_tokens is None else self.max_output_tokens - output_tokens
            self.grant.end_sequence(self.prompt_tokens - charged + unused_output)
        if self.counted is not None:
            self.counted.end(output_tokens or 0)


class RequestAdmission:
    """Admits the requests of one process."""

    def __init__(self, access: Access | None, bounds: OverloadBounds) -> None:
        """``access`` has the limits of callers, None for none, and ``bounds`` those of this Frontend."""
        self._access = access
        self._bounds = bounds

    def room(self) -> BodyRoom:
        """Returns room for the body of a request of the current caller, of which nothing is taken yet."""
        return self._bounds.room(*_share_holder(), current_grant())

    def admit(
        self,
        views: Sequence[ComponentView],
        prompt_tokens: int,
        max_output_tokens: int,
        call: str,
        *,
        sequences: int = 1,
    ) -> AdmittedRequest:
        """Admits a request of the current caller. It books nothing and asks no other service.

        Args:
            views: The components of its model.
            prompt_tokens: Tokens of its prompt.
            max_output_tokens: Maximum number of output tokens of a sequence; 0 if unknown.
            call: The call, for logs.
            sequences: Number of sequences, each of which counts as a request of its caller.

        Raises:
            Unauthenticated: access is limited and there is no caller.
            RateLimited: a limit of the caller's key or tenant is reached.
            Overloaded: there is no room for it.
        """
        max_output_tokens *= sequences
        grant = None if self._access is None else self._access.count(prompt_tokens + max_output_tokens, call)
        admitted = AdmittedRequest(grant, None, prompt_tokens, max_output_tokens)
        try:
            if self._access is not None:
                for _ in range(1, sequences):
                    self._access.count(0, call)
            counted = self._bounds.admit(views, *_share_holder(), prompt_tokens, max_output_tokens)
        except BaseException:
            admitted.end(0, sent=False)
            raise
        return AdmittedRequest(grant, counted, prompt_tokens, max_output_tokens)


def _share_holder() -> tuple[str, float]:
    """Returns who has a share of the bounds, and its weight."""
    caller = current_caller()
    # A tenant that a client claims would give a share to whoever claims many.
    return ("", 1.0) if caller is None else (caller.share_holder, caller.weight)
