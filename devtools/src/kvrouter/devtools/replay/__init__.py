"""Replays traces through a Frontend and reports the results."""
