"""Admits requests, of the APIs and of gateways alike, within the limits of their callers and of this Frontend."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.quotas import Grant
from kvrouter.frontend.admission.overload_bounds import CountedRequest, OverloadBounds
from kvrouter.runtime.discovery.directory import ComponentView


class AdmittedRequest:
    """A request that counts until it is ended. End it once."""

    __slots__ = ("_counted", "_grant", "_prompt_tokens")

    def __init__(self, grant: Grant | None, counted: CountedRequest | None, prompt_tokens: int) -> None:
        self._grant = grant
        self._counted = counted
        self._prompt_tokens = prompt_tokens

    def end(self, output_tokens: int | None) -> None:
        """Ends the request; ``output_tokens`` is 0 if it had no output, and None if their number is not known."""
        if self._grant is not None:
            self._grant.end(self._prompt_tokens + output_tokens if output_tokens else output_tokens)
        if self._counted is not None:
            self._counted.end(output_tokens or 0)


class RequestAdmission:
    """Admits the requests of one process."""

    def __init__(self, access: Access | None = None, bounds: OverloadBounds | None = None) -> None:
        """``access`` has the limits of callers, ``bounds`` those of this Frontend; None limits nothing."""
        self._access = access
        self._bounds = bounds

    def admit(
        self, views: Sequence[ComponentView], prompt_tokens: int, max_output_tokens: int, call: str
    ) -> AdmittedRequest:
        """Admits a request of the current caller. It books nothing and asks no other service.

        Args:
            views: The components of its model.
            prompt_tokens: Tokens of its prompt.
            max_output_tokens: Maximum number of output tokens; 0 if unknown.
            call: The call, for logs.

        Raises:
            Unauthenticated: access is limited and there is no caller.
            RateLimited: a limit of the caller's key or tenant is reached.
            Overloaded: there is no room for it.
        """
        grant: Grant | None = None
        # A tenant that a client claims would give a share to whoever claims many.
        tenant, weight = "", 1.0
        if self._access is not None:
            caller = self._access.caller()
            tenant, weight = caller.tenant, caller.weight
            grant = self._access.grant(prompt_tokens + max_output_tokens, call, caller)
        if self._bounds is None:
            return AdmittedRequest(grant, None, prompt_tokens)
        try:
            counted = self._bounds.admit(views, tenant, weight, prompt_tokens, max_output_tokens)
        except BaseException:
            if grant is not None:
                grant.end(0)
            raise
        return AdmittedRequest(grant, counted, prompt_tokens)
