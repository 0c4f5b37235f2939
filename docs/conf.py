"""Configure Sphinx for `scripts/docs`. Dead links and anchors, and pages that no index lists, are errors.

The site uses Sphinx with MyST and Furo. All three are maintained, read the Markdown that GitHub also shows, and load
nothing from other sites. MkDocs has had no release since 2024.
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

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "commands",
    "schemas",
    "wrapping",
    "offline",
]
exclude_patterns = ["_build"]

myst_heading_anchors = 4
# A link leads to a page, an anchor or a site. Any other word in a link is a mistake, not a reference to look up.
myst_all_links_external = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
smartquotes = False

# A button copies what a user types: commands without their prompt and output. `text` blocks are outputs and formats.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"edgeq {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
