"""How Sphinx builds the site: `scripts/docs`. Dead links and anchors, and pages that no index reaches, are errors.

Sphinx with MyST and Furo, because all three are maintained, read the Markdown that GitHub shows too, and load nothing
from elsewhere (MkDocs has had no release since 2024).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from edgeq import __version__

project = "edgeq"
author = "edgeq contributors"
copyright = "edgeq contributors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "schemas", "offline"]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
# A link is to a page, an anchor or a site; a word that is none of these is a mistake, not a reference to look up.
myst_all_links_external = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
smartquotes = False

html_theme = "furo"
html_title = f"edgeq {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
