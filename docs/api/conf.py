"""Sphinx configuration of the API reference: `make docs` builds it from docstrings."""

from __future__ import annotations

from kvrouter.runtime.version import VERSION

project = "kvrouter"
author = "The kvrouter authors"
copyright = author  # noqa: A001 - Sphinx's name for it
release = VERSION

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False

html_theme = "alabaster"
html_title = f"kvrouter {release}"
