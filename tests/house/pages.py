"""The pages of the documentation, cut into blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` is the text block right after a Python block: what it must print."""

    line: int
    language: str
    code: str
    output: str | None


def blocks(text: str) -> list[Block]:
    found = list(_FENCE.finditer(text))
    result = []
    for match, after in zip(found, [*found, None][1:], strict=True):
        follows = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        output = after[2] if after is not None and follows and match[1] == "python" else None
        result.append(Block(text[: match.start()].count("\n") + 2, match[1], match[2], output))
    return result


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
