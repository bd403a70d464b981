"""The site of the documentation: ``sphinx-build -W docs site``."""

import inspect
import re

from sphinx.util.nodes import make_refnode

import torchngvi

project = "torchngvi"
author = "the authors of torchngvi"
release = version = torchngvi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site", "appendix"]
myst_heading_anchors = 3
default_role = "py:obj"
html_show_copyright = False
html_theme = "furo"
html_title = f"torchngvi {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied has no prompts, and no lines that are printed
copybutton_prompt_is_regexp = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they are in the signature of the source; here the text says it
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a word that names a function here and there; the text is the same

# what docutils would take for markup in the prose of a docstring: (*batch, D), |a|, name_
_MARKUP = re.compile(r"(``.*?``)|(?<!\w)`[^`]+`|([*|]|(?<=\w)_(?!\w))")


def _escaped(app, what, name, obj, options, lines):
    """Docstrings are plain prose with code in backticks, and lines of formulas that are indented."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = _MARKUP.sub(lambda found: f"\\{found[2]}" if found[2] else found[0], line)


def _listed(app, what, name, obj, options, lines):
    """After the docstring of a module, what it exports, each with its first sentence and a link to the whole."""
    if what != "module" or not hasattr(obj, "__all__"):
        return
    here = options.members if isinstance(options.members, list) else obj.__all__ if options.members else []
    here = set(here) - set(options.exclude_members or ())
    lines.append("")
    for each in sorted((each for each in obj.__all__ if not each.startswith("_")), key=str.lower):
        found = getattr(obj, each)
        home = f"{getattr(found, '__module__', name)}.{each}"
        place = found.__name__ if inspect.ismodule(found) else f"{name}.{each}" if each in here else home
        said = inspect.getdoc(found) if callable(found) or inspect.ismodule(found) else None
        first = re.split(r"(?<=\.)\s(?=[A-Z])|\n\n", said, maxsplit=1)[0].replace("\n", " ") if said else ""
        item = [f"- `{each} <{place}>`: {first}" if first else f"- `{each} <{place}>`"]
        _escaped(app, what, name, obj, options, item)
        lines += item
    lines.append("")


def _inherited(app, what, name, obj, skip, options):
    """The methods that scikit-learn makes for its routing of metadata are documented there."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def _home(app, env, node, text):
    """The entry of a name that torchngvi itself exports, which stands under the package that it comes from."""
    package, _, name = node.get("reftarget", "").partition(".")
    if node.get("refdomain") != "py" or package != "torchngvi" or "." in name or not hasattr(torchngvi, name):
        return None
    parts = getattr(getattr(torchngvi, name), "__module__", "").split(".")
    entries = env.get_domain("py").objects
    for length in range(len(parts), 0, -1):
        if entry := entries.get(".".join([*parts[:length], name])):
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text)
    return None


def _link_files(app, docname, source):
    """The appendix is no part of the site: a link to it brings the file itself."""
    source[0] = re.sub(r"\]\(((?:\.\./)?appendix/\w+\.md)(?:#[\w-]*)?\)", r"](path:\1)", source[0])


def setup(app):
    """Escape before the sections of a docstring are read."""
    app.connect("source-read", _link_files)
    app.connect("autodoc-skip-member", _inherited)
    app.connect("missing-reference", _home)
    app.connect("autodoc-process-docstring", _escaped, priority=100)
    app.connect("autodoc-process-docstring", _listed, priority=200)
