"""Reads the version from the shared file of all distributions. All other metadata is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

setup(version=(Path(__file__).parents[1] / "VERSION").read_text(encoding="utf-8").strip())
