"""docs/api.md: every public name has a docstring and is on the page, and a change of either is noticed."""

import importlib
import re
import types

import pytest

import shoal
from scripts import api


@pytest.fixture(scope="module")
def page():
    return api.render()


def test_every_public_name_has_a_docstring():
    assert api.undocumented() == []


def test_every_public_name_is_on_the_page(page):
    headings = set(re.findall(r"^### (.*)$", page, re.MULTILINE))
    names = {name for name in shoal.__all__ if not isinstance(getattr(shoal, name), types.ModuleType)}
    assert names | set(shoal.errors.__all__) | {"TableHandle", "export_parquet", "shoal verify"} <= headings


def public_paths():
    """Every way to import something public."""
    for name in ["shoal", *api.MODULES, "shoal.errors"]:
        for one in importlib.import_module(name).__all__:
            yield f"{name}.{one}"
    for module, one in api.interop_names():
        yield f"{module}.{one}"


def test_every_public_object_has_a_heading_of_its_own(page):
    paths: dict[int, list[str]] = {}
    for path in public_paths():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        if isinstance(value, types.FunctionType | type):
            paths.setdefault(id(value), []).append(path)
    shown = re.findall(r"^### (.*)\n```python\n(?:class )?([\w.]+)", page, re.MULTILINE)
    assert all({path for _, path in shown} & set(known) for known in paths.values())
    assert len({heading for heading, _ in shown}) == len(shown)
    assert {("save", "shoal.save"), ("interop.dcp.save", "shoal.interop.dcp.save")} <= set(shown)
    assert {("load", "shoal.load"), ("interop.dcp.load", "shoal.interop.dcp.load")} <= set(shown)


def test_classes_of_attributes_are_on_the_page(page):
    assert "\n### Repair\n" in page  # ChangeLog.repairs


def test_members_for_our_own_parts_are_not_on_the_page(page):
    assert api.OWN not in page
    assert "counted_by" not in page


def test_links_lead_to_headings(page):
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE):
        first = api.slug(heading)
        anchors.add(first if first not in anchors else f"{first}-1")
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= anchors


def test_the_page_has_nothing_of_one_machine(page):
    assert not re.search(r"0x[0-9a-f]{6,}|site-packages|[\s('\"`]/\w+/", page)


def test_defaults_stand_as_they_are_written(page):
    assert "optimizer: Optimizer | None = RowwiseAdagrad(lr=0.01)" in page
    assert "eps: float = 1e-8" in page


def test_new_names_are_found_by_themselves(monkeypatch):
    monkeypatch.setattr("shoal.interop.files.__all__", ["replacing"], raising=False)
    api.public.cache_clear()
    try:
        assert "shoal.interop.files.replacing(path: Path) -> Iterator[FilePath]" in api.render()
    finally:
        api.public.cache_clear()


def test_check_notices_a_change(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api, "PAGE", tmp_path / "api.md")
    assert api.main(["--check"]) == 1  # there is no page
    assert api.main([]) == 0
    assert api.PAGE.read_text() == page
    assert api.main(["--check"]) == 0
    capsys.readouterr()
    api.PAGE.write_text(page.replace("dim: int,", "dim: float,", 1))
    assert api.main(["--check"]) == 1
    said = capsys.readouterr()
    assert "-    dim: float," in said.out
    assert "+    dim: int," in said.out
    assert "run scripts/api" in said.err
    assert api.main(["--wrong"]) == 2
