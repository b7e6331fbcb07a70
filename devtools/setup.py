"""Reads the version from the file that all distributions share. All other metadata is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup

setup(version=(Path(__file__).parents[1] / "VERSION").read_text(encoding="utf-8").strip())
