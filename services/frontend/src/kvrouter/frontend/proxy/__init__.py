"""Requests for engines with an OpenAI API: forwarded by the Frontend, or sent there by a gateway."""
