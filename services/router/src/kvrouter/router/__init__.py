"""Routing inside of a program, without a Frontend."""

from kvrouter.router.router import Router

__all__ = ["Router"]
