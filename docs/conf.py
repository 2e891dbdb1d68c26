"""The documentation site. `python -m sphinx -W --keep-going -j 2 -c docs . build/docs` builds it, without a network.

The source directory is the repository, so that a page is one Markdown file whose links work on the site and in a clone.
Furo is the theme: a side bar and wide tables that work on a phone, dark mode, and no remote fonts or scripts.
"""

import os
import re
import sys
from collections import _tuplegetter
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

from calibjax.runtime.version import __version__

project, author, copyright = "calibjax", "The calibjax authors", "The calibjax authors"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "train/*.md", "eval/*.md", "kernels/*.md"]
exclude_patterns = ["README.md", "**/.*", ".*", "build", "runs", "tests", "calibjax", "docs/_templates", "docs/figures"]
templates_path = ["_templates"]
nitpicky = False

html_theme = "furo"
html_title = f"calibjax {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["_static/index.html"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# --- pages and notebooks ---
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # a cache knows the notebooks, not the library that they call
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# --- reference ---
autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "literal"
add_module_names = False
toc_object_entries = False


def setup(app):
    app.connect("autodoc-process-docstring", _read_docstring, priority=100)
    app.connect("autodoc-process-signature", _shorten)
    app.connect("autodoc-skip-member", _skip)
    app.connect("build-finished", _check_offline)


_CODE = re.compile(r"(`[^`]*`|^[ ]*>>> (?:.*\n?)(?:[ ]*\S.*\n?)*)", flags=re.MULTILINE)


def _read_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text with formulas; what reStructuredText would read as markup is escaped."""
    if what == "data":
        lines[:] = _attribute_docstring(name)
    parts = _CODE.split("\n".join(lines))
    parts[::2] = [re.sub(r"([|*_])", r"\\\1", part) for part in parts[::2]]
    for number in range(2, len(parts), 2):  # `array`s
        if parts[number - 1].startswith("`") and parts[number][:1].isalnum():
            parts[number] = "\\ " + parts[number]
    lines[:] = "".join(parts).split("\n")


def _shorten(app, what, name, obj, options, signature, returns):
    """`Array` for the name that its module has."""
    return tuple(text and text.replace("jaxlib._jax.Array", "Array") for text in (signature, returns))


def _check_offline(app, error):
    """A page loads nothing from elsewhere: no scripts, styles, fonts or images."""
    if error is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            for tag in re.findall(
                r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=.(?:https?:)?//[^>]*>", page.read_text()
            ):
                logging.getLogger(__name__).warning("%s loads from elsewhere: %s", page, tag)


def _attribute_docstring(name):
    """The string below an assignment, in the module that makes it: autodoc looks in the one that exports it only."""
    room, _, attribute = name.rpartition(".")
    value = getattr(sys.modules[room], attribute)
    for module in [name for name in sys.modules if name.startswith(room)]:
        if getattr(sys.modules[module], attribute, None) is value:
            found = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", attribute))
            if found:
                return found
    return [""]


def _skip(app, what, name, obj, skip, options):
    """Fields of a NamedTuple are in its docstring."""
    return True if isinstance(obj, _tuplegetter) else None
