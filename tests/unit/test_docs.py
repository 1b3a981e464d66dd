"""The Markdown pages: what they show runs, what they name is there, their links lead somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import programs
import pytest
import snippets
from click.testing import CliRunner
from snippets import PAGES, TREE

from fastprod.cli import main
from fastprod.testing import MockCluster

FOLDERS = ("asv_bench", "docs", "examples", "fastprod", "tests", r"\.ci")


def name(page: Path) -> str:
    return str(page.relative_to(TREE))


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for block in snippets.blocks(page):
            if block.kind.startswith("python"):
                block.code("localhost:1")
            assert block.kind in snippets.KINDS or snippets.NOTEST.fullmatch(block.kind), f"{block}: ```{block.kind}"


@pytest.mark.parametrize("page", snippets.of_kind(snippets.PLAIN), ids=name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MockCluster(3, topics={"orders": 6}) as cluster:
        snippets.run(page, snippets.PLAIN, cluster.bootstrap_servers)


@pytest.mark.parametrize("page", snippets.of_kind("python pytest"), ids=name)
def test_tests_pass(page: Path, tmp_path: Path) -> None:
    shutil.copy(TREE / "tests" / "conftest.py", tmp_path)
    count = 0
    for block in snippets.blocks(page):
        if block.kind == "python pytest":
            (tmp_path / f"test_line_{block.line}.py").write_text(block.text)
            count += block.text.count("def test_")
    paths = os.pathsep.join([str(TREE), *filter(None, sys.path)])
    command = ["-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = programs.run(*command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert f"{count} passed" in done.stdout, done.stdout


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words) of each command in a block, and of each `fastprod ...` in a text, which may be just a name."""
    for page in PAGES:
        for block in snippets.blocks(page):
            if block.kind in ("", "sh"):
                for line in block.text.replace("\\\n", " ").splitlines():
                    signs = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars=True)
                    signs.whitespace_split, signs.commenters = True, ""
                    words: list[str] = []
                    for sign in [*signs, ";"]:
                        if set(sign) <= set(";&|"):
                            yield str(block), [word for word in words if not re.match(r"[A-Z_]+=", word)]
                            words = []
                        else:
                            words.append(sign)
        for told in re.findall(r"`(fastprod [a-z][^`]*)`", snippets.prose(page)):
            words = shlex.split(told)
            yield name(page), words if any(word.startswith("-") for word in words) else [*words, "--help"]


def test_command_lines_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(click.Command, "invoke", lambda self, context: None)  # it has parsed its options by then
    ours = [(where, words) for where, words in commands() if words and Path(words[0]).name == "fastprod"]
    assert ours
    for where, words in ours:
        done = CliRunner().invoke(main, words[1:])
        assert done.exit_code == 0, f"{where}: {' '.join(words)}\n{done.output}"


def test_files_of_command_lines_exist() -> None:
    for where, words in commands():
        for word in words:
            if re.match(rf"({'|'.join(FOLDERS)})(/|$)", word):
                assert (TREE / word).exists(), f"{where}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for told in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`", snippets.prose(page)):
        assert (TREE / told).exists(), told


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ +(.*)$", snippets.prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for text, link in re.findall(r"\[([^\]]*)\]\(([^)]*)\)", snippets.prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"there is no {link}"
        assert target.is_relative_to(TREE), f"{link} leads out of the tree"
        if anchor:
            assert anchor in anchors(target), f"{path or name(page)} has no heading #{anchor}"
        if text.startswith("test_"):
            assert f"def {text}(" in target.read_text(), f"{path} has no {text}"


@pytest.fixture(scope="module")
def source() -> str:
    """All that the package can say, with texts in one piece that are broken over several lines."""
    files = [file for file in (TREE / "fastprod").rglob("*.py*") if file.suffix in (".py", ".pyx")]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_errors_are_worded_as_the_page_says(page: Path, source: str) -> None:
    """What differs from case to case is `...`, a number or in quotes."""
    for table in re.findall(r"^\| it says \|.*\n\|---.*\n((?:\|.*\n)+)", snippets.prose(page), re.MULTILINE):
        for told in re.findall(r"^\| `(?:\w+(?:Error|Warning): )?([^`]*)`", table, re.MULTILINE):
            for part in re.split(r"\.\.\.|\d+|'[^']*'", told):
                if len(part.strip()) > 8:
                    assert part.strip() in source, f"nothing in fastprod says «{part.strip()}», of «{told}»"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [TREE / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", snippets.prose(page))
            todo += [(page.parent / link).resolve() for link in links]
    assert not set(PAGES) - seen


def test_ci_finds_the_test_command_in_the_readme() -> None:
    (line,) = re.findall(r"^command=\$\((.*)\)$", (TREE / ".ci" / "run").read_text(), re.MULTILINE)
    found = subprocess.run(["bash", "-c", line], cwd=TREE, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"python3 -m venv \.venv && .* && \.venv/bin/python -m pytest -q .*\n", found), found
