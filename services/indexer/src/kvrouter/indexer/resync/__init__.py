"""Fetches from workers what the index lacks, and compares the two."""
