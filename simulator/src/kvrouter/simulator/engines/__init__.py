"""Engines in virtual time, their cache events, and the best choice in hindsight."""
