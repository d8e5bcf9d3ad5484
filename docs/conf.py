"""The site: `python -m sphinx -W -b html docs build/site`.

`extensions/outside.py` makes pages of the results and links of what lies outside `docs/`,
`extensions/reference.py` a page of each public name, `extensions/formulas.py` formulas without a
script, `extensions/cards.py` the cards of the first page and the sidebar. The first two write into
folders `generated/`.
"""

import pathlib
import sys
import tomllib

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
author = "The authors of hetjax"
copyright = author
version = release = PROJECT["version"]
html_baseurl = PROJECT["urls"]["Documentation"]
repository = PROJECT["urls"]["Repository"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "docs.extensions.formulas",
    "docs.extensions.outside",
    "docs.extensions.cards",
    "docs.extensions.reference",
]
exclude_patterns = ["extensions", "pictures"]

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 6  # as a code host makes them
nb_execution_mode = "off"  # blocks and notebooks are run by the tests

default_role = "py:obj"  # `name` in a docstring: a link where there is such a name, else code
suppress_warnings = ["ref.python"]  # `Facts`, without its module, may be that of two rooms
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_display_short_literal_types = True
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Fields", "params_style")]

html_math_renderer = "mathml"  # of extensions/formulas.py
html_theme = "sphinx_book_theme"
html_title = "hetjax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "repository_url": repository,
    "use_repository_button": True,
    "show_toc_level": 2,
    "max_navbar_depth": 2,  # each page has the sidebar: not with every public name
    "home_page_in_toc": True,
}
copybutton_exclude = ".linenos, .gp, .go"
