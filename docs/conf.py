"""The site of the documentation: ``sphinx-build -W docs site``."""

import importlib
import inspect
import re
from pathlib import Path

from sphinx.util.nodes import make_refnode

import torchngvi

project = "torchngvi"
author = "the authors of torchngvi"
release = version = torchngvi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}  # the pages of objects, which are made here, are .rst
exclude_patterns = ["site", "appendix"]
myst_heading_anchors = 3
default_role = "py:obj"
html_show_copyright = False
html_theme = "furo"
html_title = f"torchngvi {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_options = {"python": {"stripnl": True}}  # a blank line ends the last output of a block
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied has no prompts, and no lines that are printed
copybutton_prompt_is_regexp = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a word that names a function here and there; the text is the same

# what docutils would take for markup in the prose of a docstring: (*batch, D), |a|, name_
_MARKUP = re.compile(r"(``.*?``)|(?<!\w)`[^`]+`|([*|]|(?<=\w)_(?!\w))")


def _escaped(app, what, name, obj, options, lines):
    """Docstrings are plain prose with code in backticks, and lines of formulas that are indented."""
    if what == "data" and inspect.getdoc(obj) == inspect.getdoc(type(obj)):
        lines.clear()  # a constant without a docstring has that of its type
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = _MARKUP.sub(lambda found: f"\\{found[2]}" if found[2] else found[0], line)


# the directives of the reference: a module with all that it exports, or one object
_DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (torchngvi[\w.]*)\n((?: +:.*\n)*)", re.MULTILINE)
_OBJECT = """\
:orphan:

{title}
{line}

In the :doc:`reference <../index>` under `{package}`.

.. py:currentmodule:: {package}

.. auto{kind}:: {name}
"""
_PAGES = {}  # each name by which an object is public: the name under which its page has it


def _import(dotted):
    """The object of a name; of a function and a file of one name the function."""
    found = torchngvi
    parts = dotted.split(".")
    for depth, part in enumerate(parts[1:], 2):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join(parts[:depth]))
        found = getattr(found, part)
    return found


def _directive(found):
    """The directive that documents an object, with its options."""
    if inspect.isclass(found):
        return "exception" if issubclass(found, BaseException) else "class", {"members": ""}
    return ("function", {}) if callable(found) else ("data", {"no-value": ""})


def _list_objects(page):
    """The names in the directives of the reference, each with a directive of its own where it has one."""
    for kind, dotted, options in _DIRECTIVE.findall(page):
        if kind != "module":
            yield dotted, (kind, dict(re.findall(r":([\w-]+): *(.*)", options)))
            continue
        for name in importlib.import_module(dotted).__all__:
            yield f"{dotted}.{name}", None


def _write_objects(app):
    """Write a page for each public object, under its name in `torchngvi` or else in the first package that has it."""
    folder = Path(app.srcdir, "api", "objects")
    folder.mkdir(exist_ok=True)
    names, texts = {}, {}
    listed = list(_list_objects(Path(app.srcdir, "api", "index.md").read_text("utf-8")))
    listed.sort(key=lambda each: each[1] is None or each[1][0] != "data")  # has its docstring where it is assigned
    for dotted, own in listed:
        found, name = _import(dotted), dotted.rpartition(".")[2]
        if inspect.ismodule(found) or name == "__version__":
            continue
        front = name in torchngvi._HOME and getattr(torchngvi, name) is found
        place = names.setdefault(id(found), f"torchngvi.{name}" if front else dotted)
        _PAGES.update(dict.fromkeys((dotted, place, f"{getattr(found, '__module__', '')}.{name}"), place))
        if own or place not in texts:
            kind, options = own or _directive(found)
            package = place.rpartition(".")[0]
            text = _OBJECT.format(title=place, line="=" * len(place), package=package, kind=kind, name=place)
            texts[place] = text + "".join(f"   :{key}: {value}".rstrip() + "\n" for key, value in options.items())
    for place, text in texts.items():
        path = folder / f"{place}.rst"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    for path in folder.glob("*.rst"):
        if path.stem not in texts:
            path.unlink()


def _split_reference(app, docname, source):
    """The page of the reference lists what the pages of objects show."""
    if docname == "api/index":
        text = _DIRECTIVE.sub(lambda found: f".. automodule:: {found[2]}\n" * (found[1] == "module"), source[0])
        source[0] = re.sub(r"```\{eval-rst\}\s*```\n", "", text)


def _listed(app, what, name, obj, options, lines):
    """After the docstring of a module, what it exports, each with its first sentence and a link to its page."""
    if what != "module" or not hasattr(obj, "__all__"):
        return
    lines.append("")
    for each in sorted((each for each in obj.__all__ if not each.startswith("_")), key=str.lower):
        found = getattr(obj, each)
        place = found.__name__ if inspect.ismodule(found) else _PAGES[f"{name}.{each}"]
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
    """The entry of a public object, by whichever of its names a page or a docstring writes, and of its members."""
    if node.get("refdomain") != "py":
        return None
    entries = env.get_domain("py").objects
    for context in ("", "torchngvi.", f"{node.get('py:module')}."):
        name = context + node["reftarget"]
        owner, _, member = name.rpartition(".")
        place = _PAGES.get(name) or (f"{_PAGES[owner]}.{member}" if owner in _PAGES else None)
        if entry := entries.get(place):
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text)
    return None


# pages that stood elsewhere in an earlier release
_MOVED = {
    "how-to/compare_models": "check",
    "research/claims": "../capabilities",
    **dict.fromkeys(
        (f"api/{name}" for name in ("front", "models", "fitting", "methods", "adapters", "papers", "parts")), "index"
    ),
}


def _redirect(app, exception):
    """Leave a page that leads on at each old address."""
    for old, new in _MOVED.items() if app.builder.format == "html" and exception is None else ():
        path = Path(app.outdir, f"{old}.html")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'<meta http-equiv="refresh" content="0; url={new}.html">\n', "utf-8")


def _link_files(app, docname, source):
    """The appendix is no part of the site: a link to it brings the file itself."""
    source[0] = re.sub(r"\]\(((?:\.\./)?appendix/\w+\.md)(?:#[\w-]*)?\)", r"](path:\1)", source[0])


def setup(app):
    """Write the pages of objects, and escape before the sections of a docstring are read."""
    app.connect("builder-inited", _write_objects)
    app.connect("source-read", _split_reference)
    app.connect("build-finished", _redirect)
    app.connect("source-read", _link_files)
    app.connect("autodoc-skip-member", _inherited)
    app.connect("missing-reference", _home)
    app.connect("autodoc-process-docstring", _escaped, priority=100)
    app.connect("autodoc-process-docstring", _listed, priority=200)
