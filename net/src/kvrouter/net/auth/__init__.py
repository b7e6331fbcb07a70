"""Decides which process may call which method of a service: by its certificate, by a token, or by both."""

from kvrouter.net.auth.callers import SERVICE_ROLES, CallerCheck, CallerPeer, may_call
from kvrouter.net.auth.service_token import HEADER, ServiceToken, showing, shown_token

__all__ = ["HEADER", "SERVICE_ROLES", "CallerCheck", "CallerPeer", "ServiceToken", "may_call", "showing", "shown_token"]
