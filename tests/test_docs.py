"""Every Python block in the README and the docs runs, from top to bottom of its page."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

import lease_core
import omnirelay_dagster

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    text = page.read_text()
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if "pyspark" in page.read_text():  # the page finds a session that is running, and small
        request.getfixturevalue("local_spark")
    names: dict[str, object] = {"__name__": "__page__"}
    for line, code in blocks(page):
        exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), names)


def test_there_are_pages_to_run() -> None:
    assert len([page for page in PAGES if blocks(page)]) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def used_names(code: str) -> set[str]:
    """What a block really uses: names that are read or called, not those that are only imported."""
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("package", [lease_core, omnirelay_dagster], ids=lambda package: package.__name__)
def test_every_public_name_has_an_example_that_runs(package: ModuleType) -> None:
    shown = {name for page in PAGES for _, code in blocks(page) for name in used_names(code)}
    assert sorted(set(package.__all__) - shown) == []
