"""Imports and includes point down, never sideways.

The tables below are the architecture. A new package or folder enters it here first; a place that is not listed is an
error, so nothing can grow outside the layers.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A place may import the layers below its own and itself. Places of one layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "torch_private"),
    ("config", "metrics"),
    ("ops", "records", "planner"),
    ("index", "storage", "optim"),
    ("table",),
    ("modules", "prefetch", "log"),
    ("checkpoint", "stream", "distributed"),
    ("serving", "interop"),
    ("cli",),
)
LAYER_OF = {place: number for number, places in enumerate(LAYERS) for place in places}
# Inside `table`: a backend knows nothing of the other, and what is below memory knows neither.
APART_IN_TABLE: dict[str, frozenset[str]] = {
    "host": frozenset({"device"}),
    "device": frozenset({"host"}),
    "lower": frozenset({"host", "device"}),
    "lifecycle": frozenset({"host", "device"}),
}
NATIVE = "_native"
NATIVE_FROM_LAYER = 2

# Folder of csrc -> the other folders whose headers it may include.
NATIVE_MAY_INCLUDE: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "index": frozenset({"base"}),
    "store": frozenset({"base", "index"}),
    "kernels": frozenset({"base", "index"}),
    "lookup": frozenset({"base", "index", "store", "kernels"}),
    "device": frozenset({"base"}),
    "bind": frozenset({"base", "index", "store", "kernels", "lookup", "device"}),
}
TEST_MAY_INCLUDE = frozenset(NATIVE_MAY_INCLUDE) - {"bind"}
PYTHON_HEADER = re.compile(r"^(Python\.h|nanobind/|pybind11/)")
TORCH_HEADER = re.compile(r"^(torch/|ATen/|c10/|caffe2/)")
INCLUDE = re.compile(r"""^\s*#\s*(?:include|import)\s*[<"]([^>"]+)[>"]""")


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a module of `package` imports, at any depth of its code.

    `from a import b` yields `a.b`, since b may be a module; callers look at the leading parts only.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*prefix, alias.name])
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                relative = str(target.value)
                yield node.lineno, relative if not relative.startswith(".") else f"shoal.<relative {relative}>"


def python_violations(package: Path) -> list[str]:
    """What the Python files under `package` (the folder `shoal`) import against the rules, one sentence each."""
    found = []
    files = sorted([*package.rglob("*.py"), *package.rglob("*.pyi")])
    assert files, f"no Python file under {package}"
    for path in files:
        relative = path.relative_to(package)
        place = relative.with_suffix("").parts[0]
        if place == "__init__" or relative.name == f"{NATIVE}.pyi":
            continue  # the front door names what is public; the native stub imports nothing of ours
        if place not in LAYER_OF:
            found.append(f"{relative}: {place!r} is in no layer")
            continue
        layer = LAYER_OF[place]
        dotted = ".".join(["shoal", *relative.parent.parts])
        for line, module in imported_modules(ast.parse(path.read_text(), str(path)), dotted):
            parts = module.split(".")
            if parts[0] != "shoal":
                continue
            where = f"{relative}:{line}"
            target = parts[1] if len(parts) > 1 else ""
            if parts[:2] == ["shoal", "table"] and place == "table" and len(relative.parts) > 2 and len(parts) > 2:
                own, other = relative.parts[1], parts[2]
                if other in APART_IN_TABLE.get(own, ()):
                    found.append(f"{where}: table/{own} imports from table/{other}")
            if target == NATIVE:
                if layer < NATIVE_FROM_LAYER:
                    found.append(f"{where}: layer {layer} imports {NATIVE}; layers {NATIVE_FROM_LAYER} and up may")
            elif target not in LAYER_OF:
                found.append(f"{where}: imports {module}; name the module that defines it, not the package's front")
            elif target != place and LAYER_OF[target] >= layer:
                way = "sideways" if LAYER_OF[target] == layer else "up"
                found.append(f"{where}: {place} (layer {layer}) imports {way}: {target} (layer {LAYER_OF[target]})")
    return found


def included_folder(csrc: Path, path: Path, header: str) -> str | None:
    """The folder of csrc a header is in, or None if it is not ours."""
    beside = (path.parent / header).resolve()
    if beside.is_relative_to(csrc.resolve()) and (beside.exists() or header.startswith(".") or "/" not in header):
        inside = beside.relative_to(csrc.resolve()).parts
        return inside[0] if len(inside) > 1 and inside[0] in NATIVE_MAY_INCLUDE and beside.exists() else None
    first = header.split("/")[0]
    return first if "/" in header and first in NATIVE_MAY_INCLUDE else None


def native_violations(csrc: Path) -> list[str]:
    """What the C++ files under `csrc` include against the rules, one sentence each."""
    found = []
    files = sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cc", ".hpp", ".cpp", ".inc", ".inl"})
    assert files, f"no C++ file under {csrc}"
    for path in files:
        relative = path.relative_to(csrc)
        place = relative.parts[0] if len(relative.parts) > 1 else ""
        if place not in NATIVE_MAY_INCLUDE:
            found.append(f"{relative}: is in no folder of the layers")
            continue
        allowed = NATIVE_MAY_INCLUDE[place] | {place}
        if path.name.endswith(("_test.cc", "_test.h")):
            allowed = TEST_MAY_INCLUDE
        for line, text in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(text)
            if not match:
                continue
            header, where = match[1], f"{relative}:{line}"
            if TORCH_HEADER.match(header):
                found.append(f"{where}: includes torch's {header}")
            elif PYTHON_HEADER.match(header):
                if place != "bind" or path.name.endswith(("_test.cc", "_test.h")):
                    found.append(f"{where}: includes Python's {header} outside bind/")
            else:
                folder = included_folder(csrc, path, header)
                if folder is not None and folder not in allowed:
                    found.append(f"{where}: {place} includes {header}; it may include {sorted(allowed)}")
    return found


def test_python_imports_point_down() -> None:
    assert python_violations(ROOT / "src" / "shoal") == []


def test_native_includes_point_down() -> None:
    assert native_violations(ROOT / "csrc") == []


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config/table.py", "from shoal.errors import ConfigError"),
        ("config/table.py", "from ..errors import ConfigError"),
        ("config/table.py", "from .. import errors"),
        ("config/table.py", "from . import tiers\nfrom .tiers import Dram\nimport shoal.config.tiers"),
        ("config/table.py", "import torch, numpy\nfrom dataclasses import dataclass"),
        (
            "ops/pool/cpu.py",
            "from shoal import _native\nfrom shoal._native import pool\nfrom shoal.ops.sort import sort",
        ),
        ("ops/pool/cpu.py", "from ... import _native\nfrom ...config import Table"),
        ("table/group.py", "from shoal.index import host\nfrom shoal.storage.dram import Dram\nimport shoal.optim"),
        (
            "table/host/group.py",
            "from shoal.table.lower.tier import Below\nfrom shoal.table import group\nfrom . import plan",
        ),
        ("cli/__main__.py", "from shoal.serving import server\nfrom shoal.errors import ShoalError"),
        ("__init__.py", "from shoal.modules import EmbeddingBagCollection\nfrom . import errors"),
        ("_native.pyi", "def find() -> None: ..."),
    ],
)
def test_checker_accepts_allowed_imports(tmp_path: Path, file: str, text: str) -> None:
    assert python_violations(write(tmp_path, {file: text})) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("config/table.py", "from shoal.table import group", "up: table"),
        ("config/table.py", "from ..metrics import counter", "sideways: metrics"),
        ("metrics/counter.py", "import shoal.config.table as t", "sideways: config"),
        ("index/host.py", "from shoal.storage.dram import Dram", "sideways: storage"),
        ("index/host.py", "from .. import optim", "sideways: optim"),
        ("storage/dram.py", "def f():\n    from shoal.index import host", "sideways: index"),
        (
            "optim/sgd.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..table import group",
            "up: table",
        ),
        ("ops/pool/cpu.py", "from ...records import schema", "sideways: records"),
        ("planner/bytes.py", "from shoal import ops", "sideways: ops"),
        ("log/append.py", "try:\n    from shoal.modules import x\nexcept ImportError:\n    pass", "sideways: modules"),
        ("config/init.py", "from shoal import _native", "layer 1 imports _native"),
        ("errors.py", "import shoal._native", "layer 0 imports _native"),
        ("torch_private.py", "from shoal.errors import ShoalError", "sideways: errors"),
        ("errors.py", "import importlib\nimportlib.import_module('shoal.config')", "up: config"),
        ("table/host/group.py", "from shoal.table.device.plan import Plan", "table/host imports from table/device"),
        ("table/device/staging.py", "from ..host import staging", "table/device imports from table/host"),
        ("table/lower/tier.py", "from shoal.table.host import table", "table/lower imports from table/host"),
        ("modules/bags.py", "import shoal", "package's front"),
        ("modules/bags.py", "from shoal import Table", "package's front"),
        ("modules/bags.py", "from .. import Table", "package's front"),
        ("modules/bags.py", "from .. import *", "package's front"),
        ("utils/strings.py", "", "'utils' is in no layer"),
        ("helpers.py", "", "'helpers' is in no layer"),
        ("tables.pyi", "", "'tables' is in no layer"),
    ],
)
def test_checker_refuses_forbidden_imports(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    (violation,) = python_violations(write(tmp_path, {file: text}))
    assert complaint in violation
    assert file.split("/")[-1] in violation


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("base/status.h", "#include <string>\n#include <sys/mman.h>"),
        ("index/table.h", '#include "base/status.h"\n#include "index/bucket.h"'),
        ("store/dram.cc", '#include "../base/status.h"\n#include "dram.h"'),
        ("bind/index.cc", '#include <nanobind/nanobind.h>\n#include "index/table.h"\n#include "kernels/pool.h"'),
        ("kernels/pool_test.cc", '#include "index/table.h"\n#include "store/dram.h"\n#include "kernels/pool.h"'),
        ("kernels/pool.cc", '// #include "store/dram.h"'),
    ],
)
def test_checker_accepts_allowed_includes(tmp_path: Path, file: str, text: str) -> None:
    tree = write(tmp_path, {"base/status.h": "", "index/bucket.h": "", "store/dram.h": "", file: text})
    assert native_violations(tree) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("base/pool.cc", '#include "index/table.h"', "base includes index/table.h"),
        ("index/table.cc", '#include "store/dram.h"', "index includes store/dram.h"),
        ("index/table.cc", "#include <store/dram.h>", "index includes store/dram.h"),
        ("index/table.cc", '#include "../store/dram.h"', "index includes ../store/dram.h"),
        ("kernels/pool.cc", '  #  include "store/dram.h"', "kernels includes store/dram.h"),
        ("kernels/pool.cc", '#include "bind/index.h"', "kernels includes bind/index.h"),
        ("kernels/pool_test.cc", '#include "bind/index.h"', "includes bind/index.h"),
        ("store/dram.cc", "#include <Python.h>", "Python.h outside bind/"),
        ("store/dram.cc", "#include <nanobind/ndarray.h>", "nanobind/ndarray.h outside bind/"),
        ("bind/store.cc", "#include <torch/extension.h>", "torch/extension.h"),
        ("bind/store.cc", "#include <ATen/ATen.h>", "ATen/ATen.h"),
        ("base/pool.cc", '#include "c10/util/Half.h"', "c10/util/Half.h"),
        ("util/strings.h", "", "in no folder of the layers"),
        ("main.cc", "", "in no folder of the layers"),
    ],
)
def test_checker_refuses_forbidden_includes(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    (violation,) = native_violations(write(tmp_path, {"store/dram.h": "", file: text}))
    assert complaint in violation
