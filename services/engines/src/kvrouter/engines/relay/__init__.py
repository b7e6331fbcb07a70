"""Follows the event sockets of an engine and publishes its KV events."""
