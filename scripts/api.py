"""Writes docs/api.md: every public name of Shoal with its signature and docstring, and the command `shoal`.

    python scripts/api.py           writes the page
    python scripts/api.py --check   compares it with what it should be; prints a diff and exits with 1 where they differ

Public are the names in `shoal.__all__`, in the `__all__` of modules among them and of MODULES, what the front modules
of `shoal.interop` define, the classes that these give back, and the public members of all of them. What a class is and
how it is called is read from the source, so that defaults stand as they were written and no Python release prints them
its own way.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shoal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100

# Modules whose `__all__` is public, in addition to that of `shoal`.
MODULES = ["shoal.storage", "shoal.log"]
# Where the names of a module go, by the longest prefix that fits; what fits none is at the end, under OTHERS.
TOPICS = {
    "Tables": ["shoal.config.table"],
    "Collections": ["shoal.modules"],
    "One table": ["shoal.table"],
    "Batches and outputs": ["shoal.modules.jagged"],
    "Optimizers": ["shoal.config.optimizers"],
    "First rows": ["shoal.config.init"],
    "Tiers and storages": ["shoal.config.tiers", "shoal.config.rows", "shoal.storage"],
    "Reading ahead": ["shoal.prefetch"],
    "Log and checkpoints": ["shoal.log", "shoal.checkpoint", "shoal.records"],
    "Other formats and libraries": ["shoal.interop"],
    "Threads and debugging": ["shoal.config.threads", "shoal.config.debug"],
    "Errors and warnings": ["shoal.errors"],
}
OTHERS = "More"
COMMAND = "The command shoal"
TYPES = "Types in signatures"
# Classes that some member gives back, and that are not for users.
MACHINERY = {"Block", "Group", "Staging", "TableBlocks"}
# In the docstring of a member that only Shoal's other modules use.
OWN = "For Shoal's own parts."
# Special methods that are shown where they have a docstring.
SPECIAL = {"__len__", "__getitem__", "__iter__", "__contains__", "__enter__", "__call__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ---- the source


@dataclass(frozen=True)
class Source:
    """A module's text and what it defines at its top level."""

    module: str
    text: str
    tree: ast.Module

    def of(self, node: ast.AST) -> str:
        """The node as it is written, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or "").split())

    def define(self, name: str) -> ast.stmt | None:
        """The statement that defines a name here."""
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in assigned(node):
                return node
        return None

    def comment(self, node: ast.stmt) -> str:
        """What is said of a definition in comments: at the end of its line, or above it."""
        lines = self.text.splitlines()
        after = re.search(r"  # (?!noqa|type:)(.*)", lines[node.end_lineno - 1 if node.end_lineno else 0])
        if after:
            return after[1]
        above = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("# ") or line.strip().startswith("# ----"):
                break
            above.append(line.strip()[2:])
        return " ".join(reversed(above))


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def source(module: str) -> Source | None:
    """None where a module has no Python source, such as the native one."""
    path = getattr(importlib.import_module(module), "__file__", None) or ""
    if not path.endswith(".py"):
        return None
    text = Path(path).read_text()
    return Source(module, text, ast.parse(text))


def find(module: str, name: str) -> tuple[Source, ast.stmt] | None:
    """Where Shoal defines a name that a module knows, through the imports between."""
    here = source(module)
    if here is None:
        return None
    node = here.define(name)
    if node is not None:
        return here, node
    for one in ast.walk(here.tree):
        if isinstance(one, ast.ImportFrom) and (one.module or "").split(".")[0] == "shoal":
            for alias in one.names:
                if name == (alias.asname or alias.name):
                    return find(one.module or "", alias.name)
    return None


def class_node(cls: type) -> tuple[Source, ast.ClassDef]:
    here = source(cls.__module__)
    node = None if here is None else here.define(cls.__name__)
    assert here is not None and isinstance(node, ast.ClassDef), cls
    return here, node


# ---- what is public


@dataclass
class Entry:
    """One heading of the page.

    name: the heading: the object's own name, or its path below shoal where another object has that name.
    path: as it is imported, or None for a class that is only given back by others.
    """

    name: str
    path: str | None
    source: Source
    node: ast.stmt
    value: Any = None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


@dataclass
class Public:
    """All that is public.

    entries: by the module and the name of the definition, so that objects of one name are apart.
    """

    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    aliases: dict[str, tuple[Source, ast.stmt]] = field(default_factory=dict)

    def add(self, module: str, name: str, path: str | None) -> None:
        found = find(module, name)
        if found is None or key_of(*found, name) in self.entries:
            return
        here, node = found
        value = getattr(importlib.import_module(here.module), defined_name(node, name), None)
        heading = name
        if any(entry.name == name for entry in self.entries.values()):
            heading = (path or f"{here.module}.{name}").removeprefix("shoal.")
        self.entries[key_of(here, node, name)] = Entry(heading, path, here, node, value)

    def of(self, cls: type) -> Entry:
        """The entry of a class."""
        return self.entries[cls.__module__, cls.__name__]

    def has(self, here: Source, node: ast.stmt, name: str) -> bool:
        return key_of(here, node, name) in self.entries

    def classes(self) -> list[type]:
        return [entry.value for entry in self.entries.values() if isinstance(entry.value, type)]


def key_of(here: Source, node: ast.stmt, name: str) -> tuple[str, str]:
    return here.module, defined_name(node, name)


def defined_name(node: ast.stmt, name: str) -> str:
    """What a definition calls itself; `name` for an assignment."""
    return getattr(node, "name", name)


@functools.cache
def public() -> Public:
    """Finds all that is public, in a fixed order."""
    found = Public()
    modules = list(MODULES)
    for name in shoal.__all__:
        if isinstance(getattr(shoal, name), types.ModuleType):
            modules.append(f"shoal.{name}")
        else:
            found.add("shoal", name, f"shoal.{name}")
    for module in modules:
        for name in importlib.import_module(module).__all__:
            found.add(module, name, f"{module}.{name}")
    for module, name in interop_names():
        found.add(module, name, f"{module}.{name}")
    while add_given(found) or add_bases(found):
        pass
    return found


def interop_names() -> Iterator[tuple[str, str]]:
    """What the modules of `shoal.interop` offer: those with an `__all__`, or that no other of them imports."""
    package = importlib.import_module("shoal.interop")
    modules = [f"shoal.interop.{one.name}" for one in pkgutil.iter_modules(package.__path__)]
    sources = [one for one in map(source, modules) if one is not None]
    used = {
        one.module
        for other in sources
        for one in ast.walk(other.tree)
        if isinstance(one, ast.ImportFrom) and one.module in modules
    }
    for one in sources:
        names = getattr(importlib.import_module(one.module), "__all__", None)
        if names is None and one.module not in used:
            definitions = (ast.ClassDef, ast.FunctionDef)
            names = [node.name for node in one.tree.body if isinstance(node, definitions) and node.name[0] != "_"]
        for name in names or []:
            yield one.module, name


def add_given(found: Public) -> bool:
    """Adds classes that calls give back, and the aliases in signatures; says whether there were any."""
    before = len(found.entries) + len(found.aliases)
    for entry in list(found.entries.values()):
        for here, annotation, is_result in annotations_of(entry):
            for name in sorted({one.id for one in ast.walk(annotation) if isinstance(one, ast.Name)}):
                if name in MACHINERY or name.startswith("_"):
                    continue
                at = find(here.module, name)
                if at is None:
                    continue
                if isinstance(at[1], (ast.Assign, ast.AnnAssign)):
                    if not found.has(*at, name):
                        found.aliases.setdefault(name, at)
                elif is_result and isinstance(at[1], ast.ClassDef):
                    found.add(here.module, name, None)
    return len(found.entries) + len(found.aliases) > before


def add_bases(found: Public) -> bool:
    """Adds public classes that several public classes have as a base."""
    before = len(found.entries)
    classes = found.classes()
    for cls in classes:
        for base in cls.__mro__[1:]:
            is_ours = base.__module__.split(".")[0] == "shoal" and base.__name__[0] != "_"
            is_new = (base.__module__, base.__name__) not in found.entries
            if is_ours and is_new and sum(issubclass(one, base) for one in classes) > 1:
                found.add(base.__module__, base.__name__, None)
    return len(found.entries) > before


def annotations_of(entry: Entry) -> Iterator[tuple[Source, ast.expr, bool]]:
    """Each annotation of an entry and its members, and whether it is of what is given back."""
    if not isinstance(entry.value, type):
        nodes: list[tuple[Source, ast.AST]] = [(entry.source, entry.node)]
    else:
        nodes = [(member.source, member.node) for member in members(entry.value)]
        nodes += list(fields_of(entry.value).values())
        here, node = class_node(entry.value)
        made = [one for one in functions(node) if one.name == "__init__"]
        nodes += [(here, one) for one in made]
        nodes += [(here, one) for init in made for one in ast.walk(init) if is_attribute(one)]
    for here, node in nodes:
        if isinstance(node, Function):
            arguments = node.args
            for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if one.annotation is not None:
                    yield here, parsed(one.annotation), False
            if node.returns is not None:
                yield here, parsed(node.returns), True
        elif isinstance(node, ast.AnnAssign):
            yield here, parsed(node.annotation), True


def is_attribute(node: ast.AST) -> bool:
    """Whether a statement gives `self` a public attribute, with its type."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Attribute):
        return False
    return isinstance(node.target.value, ast.Name) and node.target.value.id == "self" and node.target.attr[0] != "_"


def parsed(annotation: ast.expr) -> ast.expr:
    """An annotation in quotes without them."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


# ---- members


@dataclass(frozen=True)
class Member:
    """A public method or property of a class.

    doc: its own docstring, or None. has_inherited: whether a base documents it, ours or another library's.
    """

    name: str
    source: Source
    node: Function
    kind: str
    doc: str | None
    has_inherited: bool


def members(cls: type, elsewhere: Sequence[type] = ()) -> list[Member]:
    """Those that are listed with a class: its own, and those of bases that are not listed elsewhere."""
    found: dict[str, Member] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "shoal" or (base is not cls and base in elsewhere):
            continue
        here, node = class_node(base)
        for one in functions(node):
            if one.name in found or is_setter(one):
                continue
            doc = ast.get_docstring(one)
            if one.name.startswith("_") and (one.name not in SPECIAL or doc is None):
                continue
            if OWN in (doc or ""):
                continue
            above = [other for other in base.__mro__[1:] if one.name in vars(other)]
            inherited = any(inspect.getdoc(vars(other)[one.name]) for other in above)
            kind = kind_of(one)
            if kind == "property" and any(is_setter(other) and other.name == one.name for other in functions(node)):
                kind = "settable"
            found[one.name] = Member(one.name, here, one, kind, doc, inherited)
    return list(found.values())


def kind_of(node: Function) -> str:
    names = [one.id if isinstance(one, ast.Name) else getattr(one, "attr", "") for one in node.decorator_list]
    return next((kind for kind in ("property", "cached_property", "staticmethod", "classmethod") if kind in names), "")


def functions(node: ast.ClassDef) -> list[Function]:
    return [one for one in node.body if isinstance(one, Function)]


def is_setter(node: Function) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr in ("setter", "deleter") for one in node.decorator_list)


def fields_of(cls: type) -> dict[str, tuple[Source, ast.AnnAssign]]:
    """The fields of a dataclass, where each was written last."""
    found: dict[str, tuple[Source, ast.AnnAssign]] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "shoal":
            here, node = class_node(base)
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id[0] != "_":
                    found[one.target.id] = (here, one)
    return found


# ---- signatures


def signature(here: Source, node: Function, is_method: bool) -> list[str]:
    """The parameters as they are written; without the first one where that is bound."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(given) - len(arguments.defaults))
    defaults += arguments.defaults
    shown = [parameter(here, one, default) for one, default in zip(given, defaults, strict=True)]
    if is_method:
        shown = shown[1:]
    if arguments.vararg is not None:
        shown.append("*" + parameter(here, arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(parameter(here, one, default))
    if arguments.kwarg is not None:
        shown.append("**" + parameter(here, arguments.kwarg, None))
    return shown


def parameter(here: Source, one: ast.arg, default: ast.expr | None) -> str:
    annotation = "" if one.annotation is None else f": {written(here, one.annotation)}"
    equals = "=" if one.annotation is None else " = "
    return f"{one.arg}{annotation}" + ("" if default is None else f"{equals}{here.of(default)}")


def written(here: Source, annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return here.of(annotation)


def constructor(cls: type) -> list[str] | None:
    """The parameters of a class; None where it has none of its own to tell of."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "shoal":
            break
        here, node = class_node(base)
        own = [one for one in functions(node) if one.name == "__init__"]
        if own:
            return signature(here, own[0], is_method=True)
        if dataclasses.is_dataclass(base):
            return dataclass_parameters(cls)
    return None


def dataclass_parameters(cls: type) -> list[str]:
    texts = fields_of(cls)
    shown: list[str] = []
    for name, one in inspect.signature(cls).parameters.items():
        if one.kind is one.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        here, node = texts[name]
        default = "" if node.value is None else f" = {here.of(node.value)}"
        shown.append(f"{name}: {written(here, node.annotation)}{default}")
    return shown


def call(name: str, parameters: list[str], returns: str = "") -> str:
    """On one line if it fits, else a parameter a line."""
    short = f"{name}({', '.join(parameters)}){returns}"
    if len(short) <= WIDTH or not parameters:
        return short
    lines = "".join(f"    {one},\n" for one in parameters)
    return f"{name}(\n{lines}){returns}"


def returns_of(here: Source, node: Function) -> str:
    return "" if node.returns is None else f" -> {written(here, node.returns)}"


# ---- Markdown


def markdown(doc: str, names: Iterable[str]) -> str:
    """A docstring as Markdown. A paragraph that begins with `name: what it is` becomes a list of such names."""
    known = "|".join(re.escape(one) for one in sorted(set(names), key=len, reverse=True))
    head = re.compile(rf"((?:{known})(?:, (?:{known}))*): ") if known else None
    paragraphs = []
    for paragraph in re.split(r"\n{2,}", doc.expandtabs().strip()):
        before: list[str] = []
        items: list[str] = []
        for line in paragraph.splitlines():
            if head is not None and head.match(line):
                items.append(line)
            elif items:
                items[-1] += f" {line.strip()}"
            else:
                before.append(line)
        paragraphs += ["\n".join(before)] if before else []
        if head is not None and items:
            # Some are in the middle of a line.
            each = [one for item in items for one in re.split(rf"(?<=[.;]) (?={head.pattern})", item) if one]
            each = [one for one in each if head.match(one)]
            paragraphs.append("\n".join(list_item(one, head) for one in each))
    return "\n\n".join(paragraphs)


def list_item(text: str, head: re.Pattern[str]) -> str:
    found = head.match(text)
    assert found
    shown = ", ".join(f"`{one}`" for one in found[1].split(", "))
    return textwrap.fill(f"- {shown}: {text[found.end() :]}", 120, subsequent_indent="  ", break_long_words=False)


def parameter_names(parameters: Iterable[str]) -> list[str]:
    return [re.match(r"\**\w*", one)[0].lstrip("*") for one in parameters]  # type: ignore[index]


def show_entry(entry: Entry, listed: Public) -> str:
    if isinstance(entry.node, Function):
        parameters = signature(entry.source, entry.node, is_method=False)
        head = call(entry.path or entry.name, parameters, returns_of(entry.source, entry.node))
        doc = markdown(ast.get_docstring(entry.node) or "", parameter_names(parameters))
        return f"### {entry.name}\n```python\n{head}\n```\n{doc}\n"
    if not entry.is_class:
        return f"### {entry.name}\n```python\n{entry.source.of(entry.node)}\n```\n{entry.source.comment(entry.node)}\n"
    return show_class(entry, listed)


def show_class(entry: Entry, listed: Public) -> str:
    cls: type = entry.value
    parameters = constructor(cls)
    is_result = any("field(" in one for one in parameters or [])  # defaults that are not typed by hand
    is_made = entry.path is not None and parameters is not None and not is_result
    is_made = is_made and not issubclass(cls, BaseException)
    known = [*parameter_names(parameters or []), *fields_of(cls)]
    if is_made:
        head = call(f"class {entry.path}", parameters or [])
    else:
        bases = [written(entry.source, base) for base in typing.cast(ast.ClassDef, entry.node).bases]
        head = f"class {entry.path or entry.name}" + (f"({', '.join(bases)})" if bases else "")
    out = [f"### {entry.name}\n```python\n{head}\n```\n", markdown(ast.get_docstring(entry.node) or "", known), "\n"]  # type: ignore[arg-type]
    bases = [] if issubclass(cls, BaseException) else [base for base in cls.__mro__[1:] if base in listed.classes()]
    nearest = [base for base in bases if not any(issubclass(one, base) and one is not base for one in bases)]
    if nearest:
        linked = " and ".join(f"[{base.__name__}](#{anchor(listed.of(base), listed)})" for base in nearest)
        out.append(f"\nIt has the members of {linked} too.\n")
    items = []
    if not is_made:
        for name, (here, node) in fields_of(cls).items():
            comment = here.comment(node)
            items.append(f"- `{name}: {written(here, node.annotation)}`" + (f": {comment}" if comment else ""))
    items += [show_member(one) for one in members(cls, listed.classes()) if one.doc]
    names = [] if dataclasses.is_dataclass(cls) else attributes(cls, items)
    if names:
        out.append("\nAttributes: " + ", ".join(f"`{one}`" for one in names) + ".\n")
    if items:
        out.append("\nMembers:\n" + "\n".join(items) + "\n")
    return "".join(out)


def attributes(cls: type, shown: list[str]) -> list[str]:
    """Public names that the class's own methods set on `self`, and that are not shown otherwise."""
    _, node = class_node(cls)
    found = {
        one.attr: None
        for function in functions(node)
        for one in ast.walk(function)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
        if isinstance(one.value, ast.Name) and one.value.id == "self" and one.attr[0] != "_"
    }
    return [one for one in found if not any(item.startswith((f"- `{one}:", f"- `{one}(")) for item in shown)]


def show_member(member: Member) -> str:
    here, node = member.source, member.node
    if member.kind in ("property", "cached_property", "settable"):
        kind = "" if node.returns is None else f": {written(here, node.returns)}"
        head, parameters = f"{member.name}{kind}", []
    else:
        parameters = signature(here, node, is_method=member.kind != "staticmethod")
        head = f"{member.name}({', '.join(parameters)}){returns_of(here, node)}"
    doc = markdown(member.doc or "", parameter_names(parameters))
    what = {
        "": "",
        "staticmethod": " (static)",
        "classmethod": " (of the class)",
        "settable": " (property; it can be set)",
    }.get(member.kind, " (property)")
    return f"- `{head}`{what}<br>\n" + textwrap.indent(doc, "  ")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading that no other has."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchor(entry: Entry, found: Public) -> str:
    """That of an entry: of two that differ in case only, as `prefetch` and `Prefetch`, the second has a number."""
    same = sorted((one for one in found.entries.values() if slug(one.name) == slug(entry.name)), key=position)
    number = same.index(entry)
    return slug(entry.name) + (f"-{number}" if number else "")


def position(entry: Entry) -> tuple[bool, str, int]:
    """Where an entry stands in its topic: what is imported first, then what calls give back, as they are defined."""
    return entry.path is None, entry.source.module, entry.node.lineno


def topic_of(entry: Entry) -> str:
    best, topic = "", OTHERS
    for name, prefixes in TOPICS.items():
        for prefix in prefixes:
            fits = entry.source.module == prefix or entry.source.module.startswith(f"{prefix}.")
            if fits and len(prefix) > len(best):
                best, topic = prefix, name
    return topic


# ---- the command


def show_command() -> tuple[list[str], str]:
    """The names of the subcommands, and what each takes."""
    import typer.main

    from shoal.cli.app import app

    group: Any = typer.main.get_command(app)
    out = [f"{group.help}\n"]
    names = []
    for name, command in group.commands.items():
        names.append(f"shoal {name}")
        usage = " ".join(one for one in map(usage_of, command.params) if one)
        doc = markdown(inspect.cleandoc(command.callback.__doc__ or ""), [])
        out.append(f"### shoal {name}\n```sh\nshoal {name} {usage}\n```\n{doc}\n")
        out.append("\n".join(map(show_option, command.params)) + "\n")
    return names, "\n".join(out)


def option_of(param: Any) -> str:
    """`--retain N`, as it is typed."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    flags = "/".join([*param.opts, *param.secondary_opts])
    if getattr(param, "is_flag", False):
        return flags
    kind = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "FILE"}
    return f"{flags} {param.metavar or kind[type_of(param)]}"


@functools.cache
def callbacks() -> dict[str, Any]:
    from shoal.cli import app as module

    return {one.name or one.callback.__name__: one.callback for one in module.app.registered_commands}


def type_of(param: Any) -> str:
    """The name of the type that a command's function asks for."""
    for callback in callbacks().values():
        hints = typing.get_type_hints(callback)
        if param.name in hints:
            hint = hints[param.name]
            kinds = [one for one in typing.get_args(hint) if one is not type(None)] or [hint]
            return str(kinds[0].__name__)
    raise LookupError(param.name)


def usage_of(param: Any) -> str:
    shown = option_of(param)
    return shown if param.required else f"[{shown}]"


def show_option(param: Any) -> str:
    default = param.default
    is_said = default is None or callable(default) or default is False or param.required
    return f"- `{option_of(param)}`: {param.help}" + ("" if is_said else f" Default: {shown_default(param)}.")


def shown_default(param: Any) -> str:
    return f"`{param.opts[0]}`" if param.default is True else f"`{param.default}`"


# ---- the page


def render() -> str:
    """The page as it should be."""
    found = public()
    topics: dict[str, list[Entry]] = {topic: [] for topic in (*TOPICS, OTHERS)}
    for entry in found.entries.values():
        topics[topic_of(entry)].append(entry)
    commands, command_text = show_command()
    head = [
        "# API\n",
        "Every public name, with its signature and docstring. `scripts/api` writes this page from the source;\n"
        "do not edit it. [training.md](training.md) and [log.md](log.md) show how the parts are used.\n",
    ]
    contents, body = [], []
    for topic, entries in topics.items():
        if not entries:
            continue
        entries.sort(key=position)
        links = " · ".join(f"[{one.name}](#{anchor(one, found)})" for one in entries)
        contents.append(f"| [{topic}](#{slug(topic)}) | {links} |")
        body.append(f"## {topic}\n")
        body += [f"{one}\n" for one in introductions(entries)]
        body += [show_entry(one, found) for one in entries]
    links = " · ".join(f"[{name}](#{slug(name)})" for name in commands)
    contents.append(f"| [{COMMAND}](#{slug(COMMAND)}) | {links} |")
    contents.append(f"| [{TYPES}](#{slug(TYPES)}) | names that stand for other types |")
    body.append(f"## {COMMAND}\n")
    body.append(command_text)
    body.append(f"## {TYPES}\n")
    body.append("Names in signatures that are not classes, and what they stand for.\n")
    aliases = sorted(found.aliases.items())
    body.append("```python\n" + "\n".join(here.of(node) for _, (here, node) in aliases) + "\n```\n")
    table = "| | |\n|---|---|\n" + "\n".join(contents) + "\n"
    return "\n".join([*head, table, *body])


def introductions(entries: list[Entry]) -> list[str]:
    """Docstrings of modules that are public themselves, such as `shoal.errors`."""
    modules = {one.source.module for one in entries}
    public_modules = [f"shoal.{name}" for name in shoal.__all__ if isinstance(getattr(shoal, name), types.ModuleType)]
    return [inspect.cleandoc(importlib.import_module(one).__doc__ or "") for one in public_modules if one in modules]


def undocumented() -> list[str]:
    """Public names without a docstring."""
    missing = []
    for entry in public().entries.values():
        is_alias = not isinstance(entry.node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        doc = entry.source.comment(entry.node) if is_alias else ast.get_docstring(entry.node)  # type: ignore[arg-type]
        if not doc:
            missing.append(entry.path or entry.name)
        if isinstance(entry.value, type):
            missing += [
                f"{entry.name}.{one.name}"
                for one in members(entry.value, public().classes())
                if not one.doc and not one.has_inherited
            ]
    return missing


def difference(old: str, new: str) -> str:
    """A diff of two pages, empty where they are the same."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), "docs/api.md", "docs/api.md as it should be"
    )
    return "".join(lines)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    new = render()
    if not arguments:
        PAGE.write_text(new)
        return 0
    found = difference(PAGE.read_text() if PAGE.exists() else "", new)
    if found:
        print(found, end="")
        print("scripts/api: docs/api.md is not what the source says; run scripts/api", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
