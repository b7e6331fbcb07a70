"""Authenticates and authorizes the calls of a Frontend.

A call that this module does not list as a client's needs the role admin, so that a new call is protected until somebody
decides otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NoReturn

from kvrouter.frontend.access.api_keys import ApiKeys
from kvrouter.frontend.access.caller import Caller, Role, acting_for, current_caller
from kvrouter.frontend.access.credentials import credential_of
from kvrouter.frontend.access.quotas import Grant, LimitReached, Quotas
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason, Refusals
from kvrouter.frontend.access.rules import RuleBroken
from kvrouter.frontend.access.tokens import TokenVerifier, is_token
from kvrouter.runtime.errors import KvRouterError, PermissionDenied
from kvrouter.runtime.rpc import Metadata

_SERVICE = "/kvrouter.v1.FrontendService/"
_CLIENT_METHODS = frozenset(
    f"{_SERVICE}{name}"
    for name in (
        "Generate",
        "BestWorker",
        "PotentialLoads",
        "PrefillComplete",
        "Release",
        "ListModels",
        "KeepSession",
        "FindOverlaps",
    )
)
_CLIENT_PATHS = "/v1/"
"""Beginning of the HTTP paths of clients; others need the role admin."""
_MODELS_PATH = "/v1/models"
_ENGINE_PATHS = frozenset(
    f"/v1/{name}" for name in ("completions", "chat/completions", "responses", "messages", "embeddings")
)
"""Paths of engines that run a model."""


class Access:
    """Authentication of one Frontend."""

    def __init__(
        self, keys: Callable[[], ApiKeys], tokens: TokenVerifier | None, refusals: Refusals, quotas: Quotas
    ) -> None:
        """Creates it.

        Args:
            keys: Returns the API keys in force.
            tokens: Verifies JSON Web Tokens; None to refuse them.
            refusals: Counts and logs.
            quotas: Limits of the callers.
        """
        self._quotas = quotas
        self._keys = keys
        self._tokens = tokens
        self._refusals = refusals

    def admit(self, method: str, metadata: Metadata) -> AbstractContextManager[None]:
        """Authenticates a gRPC call; see ``kvrouter.runtime.rpc.Guard``.

        Raises:
            Unauthenticated, PermissionDenied.
        """
        caller = self.authenticate(metadata, method)
        self.require_role(caller, method, is_client_call=method in _CLIENT_METHODS)
        return acting_for(caller)

    def admit_http(self, method: str, path: str, headers: Iterable[tuple[str, str]]) -> AbstractContextManager[None]:
        """Authenticates an HTTP request and returns a context in which it runs.

        Raises:
            Unauthenticated, PermissionDenied.
        """
        call = f"{method} {path[:128]}"
        caller = self.authenticate(headers, call)
        self.require_role(caller, call, is_client_call=path.startswith(_CLIENT_PATHS))
        return acting_for(caller)

    def admit_to_engine(self, path: str, headers: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Authenticates a request that a gateway passes on to an engine; returns the caller.

        Engines have administrative calls too, so only the paths that run a model are a client's.

        Raises:
            Unauthenticated, PermissionDenied.
        """
        path = path.partition("?")[0]
        call = f"engine {path[:128]}"
        caller = self.authenticate(headers, call)
        lists_models = path == _MODELS_PATH and caller.models is None
        self.require_role(caller, call, is_client_call=path in _ENGINE_PATHS or lists_models)
        return caller

    def authenticate(self, headers: Iterable[tuple[str, str | bytes]], call: str) -> Caller:
        """Returns the caller whose credential the headers have.

        Raises:
            Unauthenticated: there is no valid credential.
        """
        try:
            credential = credential_of(headers)
            if self._tokens is not None and is_token(credential):
                return self._tokens.authenticate(credential, self._keys().tenants)
            return self._keys().authenticate(credential)
        except CredentialRefused as refused:
            self._refusals.note(refused.why, refused, caller=refused.caller, call=call)
            raise

    def require_role(self, caller: Caller, call: str, *, is_client_call: bool) -> None:
        """Checks that the role of a caller permits a call.

        Raises:
            PermissionDenied: it does not.
        """
        if is_client_call or caller.role is Role.ADMIN:
            return
        self.refuse(
            RefusalReason.ROLE,
            PermissionDenied(f"expected the role {Role.ADMIN.value}, the caller has the role {caller.role.value}"),
            caller=caller,
            call=call,
        )

    def caller(self) -> Caller:
        """Returns the caller of the call that runs in this task.

        Raises:
            Unauthenticated: none was authenticated.
        """
        caller = current_caller()
        if caller is None:
            refused = CredentialRefused(RefusalReason.NO_CREDENTIAL)
            self._refusals.note(refused.why, refused, caller="", call="")
            raise refused
        return caller

    def enforce(self, rule: Callable[[Caller], None], call: str) -> Caller:
        """Checks a rule for the current caller, and returns the caller.

        Raises:
            Unauthenticated: there is no caller.
            PermissionDenied: the rule is broken.
        """
        caller = self.caller()
        try:
            rule(caller)
        except RuleBroken as broken:
            self.refuse(broken.why, broken, caller=caller, call=call)
        return caller

    def grant(self, tokens: int, call: str, caller: Caller | None = None) -> Grant:
        """Admits a request of a caller, by default the current one, within its limits.

        Args:
            tokens: Estimate of its prompt and output tokens.
            call: The call, for logs.
            caller: The caller.

        Raises:
            Unauthenticated: there is no caller.
            RateLimited: a limit of its key or tenant is reached.
        """
        caller = caller or self.caller()
        try:
            return self._quotas.admit(caller, tokens)
        except LimitReached as reached:
            self.refuse(reached.why, reached, caller=caller, call=call)

    def refuse(self, why: RefusalReason, error: KvRouterError, *, caller: Caller, call: str) -> NoReturn:
        """Counts and logs a refusal, and raises its error."""
        self._refusals.note(why, error, caller=caller.name, call=call)
        raise error

    @property
    def isolates_tenants(self) -> bool:
        """Whether any tenant's cache is isolated."""
        return any(tenant.isolated for tenant in self._keys().tenants.values())
