"""Configuration of Sphinx, which builds the site with ``make docs``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import dasksc

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
import inventories  # noqa: E402

project = "dasksc"
author = "the dasksc developers"
copyright = author
version = release = dasksc.__version__

extensions = [
    "commands",
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxext.opengraph",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]  # pages of classes show the signature once

# Pages remain readable as plain Markdown.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Tutorials are notebooks in Markdown. Each runs in a temporary folder, and a cell that raises an exception fails the
# build. Outputs are cached per version of the package's code.
code = hashlib.blake2b(digest_size=8)
for path in sorted(Path(dasksc.__file__).parent.rglob("*.py")):
    code.update(path.read_bytes())
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / ".cache" / "notebooks" / code.hexdigest())
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True

# The reference comes from the docstrings; types live in annotations.
default_role = "py:obj"
autosummary_generate = True
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88  # longer ones have a line for each parameter
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
numpydoc_show_class_members = False
# If a trainer is not installed, the module of dasksc for it is documented without the arguments of the trainer.
TRAINERS = ("lightning", "pytorch_lightning", "scvi", "transformers")
autodoc_mock_imports = [name for name in TRAINERS if importlib.util.find_spec(name) is None]

# Names of other libraries link to their documentation.
intersphinx_mapping = inventories.write(DOCS / "generated" / "inventories")
intersphinx_disabled_reftypes = ["std:doc"]

# Prompts and output are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Link previews need absolute URLs. DOCS_URL is the URL of the published site.
html_baseurl = os.environ.get("DOCS_URL", "")
ogp_site_url = html_baseurl
ogp_site_name = "dasksc"
ogp_type = "website"
ogp_image = "_static/preview.png"
ogp_image_alt = "dasksc: single-cell atlases on disk, as PyTorch batches"
ogp_social_cards = {"enable": False}
ogp_custom_meta_tags = ['<meta name="twitter:card" content="summary_large_image">']

html_theme = "sphinx_book_theme"
html_title = "dasksc"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/mark.svg"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_persistent": [],  # the search is in the navigation
    "logo": {"image_light": "_static/logo-light.svg", "image_dark": "_static/logo-dark.svg", "alt_text": "dasksc"},
}

# Pages whose text is outside docs/, where a short page links to each.
ELSEWHERE = {
    "benchmarks_log": "benchmarks/README.md",
    "benchmarks_tried": "benchmarks/tried.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
}


def read_elsewhere(app: Any, page: str, source: list[str]) -> None:
    """Read the text of a page from its file outside docs/, and turn links to such files into links to their pages."""
    text = source[0]
    if page in ELSEWHERE:
        file = DOCS.parent / ELSEWHERE[page]
        app.env.note_dependency(str(file))
        text = re.sub(
            r"(?<=\]\()(?![a-z]+:)[^)#]+", lambda link: os.path.relpath(file.parent / link[0], DOCS), file.read_text()
        )
    folder = Path(page).parent
    for name, path in ELSEWHERE.items():
        text = text.replace(f"]({os.path.relpath(f'../{path}', folder)}", f"]({os.path.relpath(f'{name}.md', folder)}")
    source[0] = text


def name_defaults(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Replace functions that are default values in a signature by their names, so that Sphinx can parse it."""
    named = re.sub(r"<(?:built-in )?function (\w+)[^>]*>", r"\1", signature) if signature else signature
    return named, returned


def setup(app: Any) -> None:
    """Connect the functions above to events of Sphinx."""
    app.connect("autodoc-process-signature", name_defaults)
    app.connect("source-read", read_elsewhere)
