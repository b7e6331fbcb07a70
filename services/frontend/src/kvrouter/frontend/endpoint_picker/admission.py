"""Admits the requests of gateways, within the limits of their callers and of this Frontend."""

from __future__ import annotations

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller
from kvrouter.frontend.access.quotas import Grant
from kvrouter.frontend.admission.overload_bounds import CountedRequest, OverloadBounds
from kvrouter.frontend.api.openai.routed_body import RoutedBody
from kvrouter.runtime.discovery.directory import ComponentView


class AdmittedRequest:
    """A request that counts until it is ended. End it once."""

    def __init__(self, grant: Grant | None, admitted: CountedRequest | None, prompt_tokens: int) -> None:
        self._grant = grant
        self._admitted = admitted
        self._prompt_tokens = prompt_tokens

    def end(self, output_tokens: int | None) -> None:
        """Ends the request; ``output_tokens`` is 0 if it had no output, and None if their number is not known."""
        if self._grant is not None:
            self._grant.end(self._prompt_tokens + output_tokens if output_tokens else output_tokens)
        if self._admitted is not None:
            self._admitted.end(output_tokens or 0)


class PickerAdmission:
    """Admits requests as the Frontend's own API does."""

    def __init__(self, access: Access | None, admission: OverloadBounds | None) -> None:
        """``access`` and ``admission`` are those of the Frontend; None limits nothing."""
        self._access = access
        self._admission = admission

    def admit(self, view: ComponentView, body: RoutedBody, caller: Caller | None) -> AdmittedRequest:
        """Admits a request to a model's component.

        Raises:
            RateLimited: a limit of the caller's key or tenant is reached.
            Overloaded: there is no room for it.
        """
        grant: Grant | None = None
        tenant, weight = "", 1.0
        if self._access is not None:
            grant = self._access.grant(body.prompt_tokens + body.max_output_tokens, "engine request", caller)
        if caller is not None:
            tenant, weight = caller.tenant, caller.weight
        if self._admission is None:
            return AdmittedRequest(grant, None, body.prompt_tokens)
        try:
            admitted = self._admission.admit(view, tenant, weight, body.prompt_tokens, body.max_output_tokens)
        except BaseException:
            if grant is not None:
                grant.end(0)
            raise
        return AdmittedRequest(grant, admitted, body.prompt_tokens)
