"""Requests that engines with an OpenAI API answer: forwarded by the Frontend, or sent there by a gateway."""
