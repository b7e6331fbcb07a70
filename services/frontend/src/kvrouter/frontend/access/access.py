"""Authenticates and authorizes the calls of a Frontend.

A call this module does not list as a client's needs the role admin, so a new call is protected until somebody
decides otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

from kvrouter.engines.fields import HARMLESS
from kvrouter.engines.routes import PASSED_ROUTES
from kvrouter.frontend.access.api_keys import HEADERS, ApiKeys, credential_of
from kvrouter.frontend.access.cache_salts import CacheSalts
from kvrouter.frontend.access.caller import Caller, Role, acting_for, current_caller, current_grant
from kvrouter.frontend.access.quotas import TOKEN_BYTES, Grant, LimitReached, Quotas
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason, Refusals, RuleBroken
from kvrouter.frontend.access.rules import FieldRules
from kvrouter.runtime.rpc import Metadata
from kvrouter.v1.errors import KvRouterError, PermissionDenied

if TYPE_CHECKING:
    from kvrouter.frontend.access.json_web_tokens import JsonWebTokens


def is_token(credential: str) -> bool:
    """Returns whether a credential has the form of a JSON Web Token: three parts with points between them."""
    return credential.count(".") == 2


_SERVICE = "/kvrouter.v1.FrontendService/"
_RUNNING_METHOD = f"{_SERVICE}Generate"
_COUNTED_METHODS = frozenset(
    f"{_SERVICE}{name}" for name in ("Generate", "SelectWorker", "GetPotentialLoads", "KeepSession", "FindMatches")
)
"""Calls that count against the limits of their caller. The others cost no more than to refuse them, or end work."""
_CLIENT_METHODS = _COUNTED_METHODS | {f"{_SERVICE}{name}" for name in ("MarkPrefillComplete", "Free", "ListModels")}
_CLIENT_PATHS = "/v1/"
"""Beginning of the HTTP paths of clients; others need the role admin."""
_MODELS_PATH = "/v1/models"


_MAX_DIGITS = 12
_CREDENTIALS = re.compile(rb"\r\n(" + "|".join(HEADERS).encode() + rb"):([^\r\n]*)", re.IGNORECASE)


class Access:
    """Authentication of one Frontend."""

    def __init__(
        self,
        keys: Callable[[], ApiKeys],
        tokens: JsonWebTokens | None,
        refusals: Refusals,
        quotas: Quotas,
        salts: CacheSalts | None = None,
        fields: FieldRules | None = None,
    ) -> None:
        """Creates it.

        Args:
            keys: Returns the API keys in force.
            tokens: Verifies JSON Web Tokens; None to refuse them.
            refusals: Counts and logs.
            quotas: Limits of the callers.
            salts: Computes the salts of caches; None if no tenant is isolated.
            fields: The fields clients may set in requests to engines; None for the harmless ones.
        """
        self.salts = salts
        """Computes the salts of caches; None if no tenant is isolated."""
        self.fields = fields or FieldRules()
        """The fields clients may set in requests to engines."""
        self._quotas = quotas
        self._keys = keys
        self._tokens = tokens
        self._refusals = refusals

    def admit(self, method: str, metadata: Metadata, size: int) -> AbstractContextManager[None]:
        """Authenticates a gRPC call; see ``kvrouter.runtime.rpc.Guard``. Its context begins if a limit permits it.

        Raises:
            Unauthenticated, PermissionDenied.
        """
        caller = self.authenticate(metadata, method)
        self.require_role(caller, method, is_client_call=method in _CLIENT_METHODS)
        if method in _COUNTED_METHODS:
            return _Counted(self, caller, method, size, runs=method == _RUNNING_METHOD)
        return acting_for(caller)

    def check(self, method: str, metadata: Metadata) -> None:
        """Checks a gRPC call, of which nothing is counted yet, before its request is read.

        Raises:
            Unauthenticated, PermissionDenied.
            RateLimited: a limit of its key or tenant is reached.
        """
        caller = self.authenticate(metadata, method)
        self.require_role(caller, method, is_client_call=method in _CLIENT_METHODS)
        if method in _COUNTED_METHODS:
            try:
                self._quotas.check(caller, runs=method == _RUNNING_METHOD)
            except LimitReached as reached:
                self.refuse(reached.why, reached, caller=caller, call=method)

    def admit_http(self, method: str, path: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Does the same for an HTTP request, whose body has not been read."""
        call = f"{method} {path[:128]}"
        caller = self.authenticate(headers.items(), call)
        passed = path in PASSED_ROUTES
        self.require_role(caller, call, is_client_call=path in HARMLESS if passed else path.startswith(_CLIENT_PATHS))
        if passed or path in HARMLESS:
            return _Counted(self, caller, call, _content_length(headers), runs=True)
        return acting_for(caller)

    def admit_to_engine(self, path: str, headers: Sequence[tuple[str, str]]) -> tuple[Caller, Grant | None]:
        """Admits a request a gateway passes on to an engine.

        Returns its caller and its part of the caller's limits, which must end; None for a path running no model.
        Engines have administrative calls too, so only the paths running a model are a client's.

        Raises:
            Unauthenticated, PermissionDenied.
            RateLimited: a limit of the caller's key or tenant is reached.
        """
        path = path.partition("?")[0]
        call = f"engine {path[:128]}"
        caller = self.authenticate(headers, call)
        runs_model = path in HARMLESS
        lists_models = path == _MODELS_PATH and caller.models is None
        self.require_role(caller, call, is_client_call=runs_model or lists_models)
        return caller, self.grant(caller, call, _content_length(dict(headers))) if runs_model else None

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

    def recognizes(self, head: bytes) -> bool:
        """Returns whether the beginning of an HTTP request has a valid credential, whose limits leave room for it.

        No token is verified for that: one is recognized from its second request on.
        """
        headers = [(name.decode(), value.strip()) for name, value in _CREDENTIALS.findall(head)]
        try:
            credential = credential_of(headers)
            if self._tokens is not None and is_token(credential):
                caller = self._tokens.remembered(credential, self._keys().tenants)
            else:
                caller = self._keys().authenticate(credential)
            if caller is not None:
                self._quotas.check(caller)
        except (CredentialRefused, LimitReached):
            return False
        return caller is not None

    def require_role(self, caller: Caller, call: str, *, is_client_call: bool) -> None:
        """Checks the permission of a caller for a call.

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
        """Returns the caller of the call running in this task.

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

    def grant(self, caller: Caller, call: str, size: int, *, runs: bool = True) -> Grant:
        """Admits a request within the limits of its caller; see ``Quotas.admit``.

        Its tokens are estimated by its ``size`` in bytes.

        Raises:
            RateLimited: a limit of its key or tenant is reached.
        """
        try:
            return self._quotas.admit(caller, size // TOKEN_BYTES, runs=runs)
        except LimitReached as reached:
            self.refuse(reached.why, reached, caller=caller, call=call)

    def count(self, tokens: int, call: str, *, passes_empty: bool = True) -> Grant:
        """Counts a sequence of the request running in this task; see ``Grant.add_sequence``. Returns its grant.

        Raises:
            Unauthenticated: there is no caller.
            RateLimited: a limit of its key or tenant is reached.
        """
        caller = self.caller()
        grant = current_grant()
        assert grant is not None, "a call that counts is admitted as such"  # noqa: S101
        try:
            grant.add_sequence(tokens, passes_empty=passes_empty)
        except LimitReached as reached:
            self.refuse(reached.why, reached, caller=caller, call=call)
        return grant

    def refuse_unsalted(self, model: str, path: str) -> NoReturn:
        """Refuses a request of an isolated tenant no engine of the model serves apart from those of others.

        Raises:
            PermissionDenied.
        """
        broken = RuleBroken(
            RefusalReason.TENANT,
            f"the tenant is isolated: expected an engine that separates caches by salt at {path}, "
            f"model {model[:128]!r} has none",
            advice="Use another path of the API, such as /v1/chat/completions, or a key whose tenant is not isolated.",
        )
        self.refuse(broken.why, broken, caller=self.caller(), call="engine request")

    def refuse(self, why: RefusalReason, error: KvRouterError, *, caller: Caller, call: str) -> NoReturn:
        """Counts and logs a refusal, and raises its error."""
        self._refusals.note(why, error, caller=caller.name, call=call)
        raise error

    @property
    def isolates_tenants(self) -> bool:
        """Whether any tenant's cache is isolated."""
        return any(tenant.isolated for tenant in self._keys().tenants.values())


class _Counted:
    """The context of a call counting against the limits of its caller while it lasts."""

    __slots__ = ("_access", "_acting", "_call", "_caller", "_grant", "_runs", "_size")

    def __init__(self, access: Access, caller: Caller, call: str, size: int, *, runs: bool) -> None:
        self._access = access
        self._caller = caller
        self._call = call
        self._size = size
        self._runs = runs

    def __enter__(self) -> None:
        self._grant = self._access.grant(self._caller, self._call, self._size, runs=self._runs)
        self._acting = acting_for(self._caller, self._grant)
        self._acting.__enter__()

    def __exit__(self, *_: object) -> None:
        self._acting.__exit__()
        self._grant.end()


def _content_length(headers: Mapping[str, str]) -> int:
    """Returns the declared size of a body; 0 if none is declared, so it is known only while the body is read."""
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and len(declared) < _MAX_DIGITS else 0
