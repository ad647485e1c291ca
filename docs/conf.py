"""How Sphinx builds these pages: ``make docs``."""

from horovod_gradcomp import __version__

project = "horovod_gradcomp"
author = "the horovod_gradcomp developers"
copyright = "2026, the horovod_gradcomp developers"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
