"""What the Markdown pages show a reader who copies it: snippets, command lines and links, for the tests that try them.

A fence says by its first words what becomes of its block:

    ```python                      runs, page by page in order, with one namespace per page, on mock brokers
    ```python pytest               is a test file of its own
    ```python kafka                runs on a real Apache Kafka that it starts itself
    ```python spark                runs where `spark` is a session, as in a notebook
    ```python notest reason=...    is only compiled
    ```sh, or nothing              command lines
    ```text                        anything else
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]
PAGES = sorted([*TREE.glob("*.md"), *TREE.glob("docs/*.md")])
PLAIN = "python"
KINDS = ("", "sh", "text", PLAIN, "python pytest", "python kafka", "python spark")
NOTEST = re.compile(r"python notest reason=\S.*")
# Where the pages' readers have their brokers, and we have not.
BROKERS = re.compile(r"\b(localhost|kafka):9092\b")


@dataclass(frozen=True)
class Block:
    """A fenced part of a page."""

    page: Path
    line: int  # of its fence, from 1
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(TREE)}:{self.line}"

    def code(self, brokers: str) -> Any:
        """Compiled so that a traceback shows the page and its line."""
        source = BROKERS.sub(brokers, self.text)
        assert not re.search(r"""["'][\w.-]+:\d{2,5}\b""", source.replace(brokers, "")), f"{self}: use localhost:9092"
        return compile("\n" * self.line + source, str(self.page), "exec")


def blocks(page: Path) -> Iterator[Block]:
    kind, start, kept = None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            assert not line.lstrip().startswith("```"), f"{page}:{number}: a fence begins at the margin"
            kept.append(line)
        elif kind is None:
            kind, start, kept = line[3:].strip(), number, []
        else:
            assert line == "```", f"{page}:{number}: the fence of line {start} is not closed"
            yield Block(page, start, kind, "\n".join(kept) + "\n")
            kind = None
    assert kind is None, f"{page}: the fence of line {start} is not closed"


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def of_kind(kind: str) -> list[Path]:
    """The pages that have such blocks."""
    return [page for page in PAGES if any(block.kind == kind for block in blocks(page))]


def run(page: Path, kind: str, brokers: str, **names: Any) -> None:
    """Runs a page's blocks of one kind, one after the other, as a script would. A warning is a failure."""
    namespace = {"__name__": "__main__", **names}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # records that a snippet leaves behind
        for block in blocks(page):
            if block.kind == kind:
                exec(block.code(brokers), namespace)
