"""Replays traces through a Frontend, and tells what came of it."""
