"""What the pages promise: snippets run, links lead somewhere, commands exist, tables equal their records."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eval.__main__ import SUBCOMMANDS
from eval.tables import MARKED, README, RESULTS, Config, render, run
from timm_locat.study import STUDIES
from timm_locat.train import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("eval/*.md"), *ROOT.glob("timm_locat/**/*.md")])
FENCED = re.compile(r"(<!-- (?P<note>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)


def snippets(page, language):
    """Code of the fenced blocks of a page, with the comment that stands directly above each."""
    return [(m["code"], m["note"]) for m in FENCED.finditer(page.read_text()) if m["language"] == language]


def runnable(page):
    """Python snippets that need nothing from outside; the others have a comment above them that says what."""
    return [code for code, note in snippets(page, "python") if note is None]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda p: p.name)
def test_python_snippets_run_in_order(page, tmp_path):
    code = runnable(page)
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_snippet_is_valid_python(page):
    for code, _ in snippets(page, "python"):
        assert compile(code, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_within_the_project_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_things_that_exist(page):
    for code, _ in snippets(page, "bash"):
        for line in code.replace("&&", "\n").splitlines():
            words = shlex.split(line, comments=True)
            for module, known in (
                ("timm_locat.train", {*RECIPES, "evaluate"}),
                ("timm_locat.study", {*STUDIES, "report", "ship"}),
                ("eval", SUBCOMMANDS),
            ):
                if module in words:
                    name = words[words.index(module) + 1]
                    assert name in known or name in ("--help", "NAME", "SUBCOMMAND"), line


def test_the_readme_opens_with_the_two_commands():
    text = README.read_text()
    first = 'pip install -e ".[train]" && accelerate launch -q -m timm_locat.train demo'
    second = 'pip install -e ".[test]" && pytest -n auto'
    assert text.index(first) < text.index(second) < text.index("import timm, torch")


@pytest.mark.parametrize("page", [p for p in PAGES if MARKED.search(p.read_text())], ids=lambda p: p.name)
def test_tables_equal_the_records(page):
    assert render(page.read_text(), RESULTS) == page.read_text()


def test_a_changed_number_is_noticed_and_mended(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(README.read_text().replace("<!-- table: speed -->\n", "<!-- table: speed -->\n| 1.0 |\n"))
    assert run(Config(file=page, check=True))[1] == 1
    assert run(Config(file=page))[1] == 0
    assert page.read_text() == README.read_text()
