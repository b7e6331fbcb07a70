"""Resync of ranks: fetches missing events or whole states from workers, and compares them with the index."""
