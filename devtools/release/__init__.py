"""Builds all artefacts of a release, so that two builds of a commit are equal byte by byte."""
