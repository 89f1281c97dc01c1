"""Would a test notice? Random faults put into the package, one at a time, and the tests that are run against each.

    python -m benchmarks.mutants [--rooms nn attach] [--each 15] [--seed 0]     goes on where it was stopped
    python -m benchmarks.mutants --equivalent nn-3 "why no test could tell it from the original"
    python -m benchmarks.mutants --again        those that survived, by the tests of today
    python -m benchmarks.mutants --table

Each seed is a sample of its own, of faults that no other has. `at_first` is what was found when a fault was drawn;
`--again` leaves it, unless what had noticed it was a slow test: the share of a fresh sample stays to be read after its
survivors were given tests.

A mutant changes one operator, number, truth value or condition, or leaves one call out. First the test files that name
what was changed are run, then all of the room; the first failing test ends it. Faults that survive are read: those that
change nothing which could be observed are marked as equivalent, the others want a test. A test that does not end has
noticed nothing if it does not end without the fault either: it is left out. Everything goes to
benchmarks/results/mutants.json. One process with the slow imports done forks for each mutant; the mutated copy of the
package comes first on the path.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import RESULTS, write_json

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS, RECORD = ROOT / "src" / "batchformer", ROOT / "tests", RESULTS / "mutants.json"
SECONDS = 150  # for a test; on a busy machine the slowest takes 90
NO_END = " did not end"
FILES = 6
OTHER_TESTS = {  # where a room's behaviour is tested, when not only in the folder of its name
    "recipes": ("recipes", "cli"),
    "parallel": ("parallel", "behaviour", "house"),
    "attach": ("attach", "behaviour"),
    "cli": ("cli", "analysis"),
    "models": ("models", "tasks"),
    "analysis": ("analysis", "tasks"),
    "training": ("training", "tasks", "cli"),
    "runs": ("runs", "cli"),
    "tasks": ("tasks", "cli"),
}
SWAPS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


class Mutant(NamedTuple):
    file: str
    line: int
    inside: str  # the function or class
    before: str
    after: str
    content: str  # of the whole file


def _between(
    source: str, left: ast.expr, right: ast.expr, swap: str, offsets: list[int]
) -> tuple[int, int, str] | None:
    """Where the operator between two operands is, and what replaces it."""
    begin = offsets[left.end_lineno - 1] + left.end_col_offset  # type: ignore[operator]
    end = offsets[right.lineno - 1] + right.col_offset
    found = re.search(r"not\s+in|is\s+not|<=|>=|==|!=|//|\b(?:in|is|and|or)\b|[-<>+*/%]", source[begin:end])
    return (begin + found.start(), begin + found.end(), swap) if found else None


def _changes(source: str, tree: ast.Module) -> Iterator[tuple[str, int, int, str]]:
    """All places: the name around, begin and end in the text, and the new text."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def place(node: Any) -> tuple[int, int]:
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    def walk(node: ast.AST, inside: str) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            return  # the words of an error
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = node.name
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                if found := _between(source, left, right, SWAPS[type(operator)], offsets):
                    yield inside, *found
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            if found := _between(source, node.left, node.right, SWAPS[type(node.op)], offsets):
                yield inside, *found
        elif isinstance(node, ast.BoolOp):
            if found := _between(source, node.values[0], node.values[1], SWAPS[type(node.op)], offsets):
                yield inside, *found
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin, _ = place(node)
            yield inside, begin, place(node.operand)[0], ""
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            begin, end = place(node.test)
            yield inside, begin, end, f"not ({source[begin:end]})"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            begin, end = place(node)
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield inside, begin, end, repr(value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            begin, end = place(node)
            yield inside, begin, end, "None"
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from walk(each, inside)

    yield from walk(tree, "")


def draw(room: str, seed: int) -> Iterator[Mutant]:
    """Mutants of a room, in an order given by the seed; a file is drawn by the number of its places."""
    generator, places = random.Random(f"{seed} {room}"), []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if source.isascii():  # positions are counted in bytes
            places += [(path, source, *change) for change in _changes(source, ast.parse(source))]
    generator.shuffle(places)
    for path, source, inside, begin, end, new in places:
        content = source[:begin] + new + source[end:]
        try:
            ast.parse(content)
        except SyntaxError:
            continue
        line = source.count("\n", 0, begin) + 1
        yield Mutant(str(path.relative_to(PACKAGE)), line, inside, source[begin:end], new, content)


def _same(entry: dict[str, Any]) -> tuple[str, ...]:
    """What stays of a fault while its lines move."""
    return tuple(entry[name] for name in ("file", "inside", "before", "after"))


def find(entry: dict[str, Any], room: str) -> Mutant | None:
    """The fault of an entry in the code of today, which may have moved by some lines."""
    same = [mutant for mutant in draw(room, 0) if _same(mutant._asdict()) == _same(entry)]
    return min(same, key=lambda mutant: abs(mutant.line - entry["line"]), default=None)


def test_files(mutant: Mutant, room: str) -> list[str]:
    """The test files that name what was changed, most often first, those of the room before others."""
    file = PACKAGE / mutant.file
    module = file.parent.name if file.stem == "__init__" else file.stem
    plain = mutant.inside.startswith("__") or mutant.inside in ("", "run")  # what many files have
    module_name, name = rf"\b{module.replace('_', '[-_]')}\b", rf"\b{re.escape(mutant.inside)}\b"
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if "interpreted" in path.parts:  # in this process they fail; `test_in_the_interpreter.py` starts them
            continue
        text = path.read_text(encoding="utf-8")
        count = len(re.findall(module_name, text)) + (0 if plain else 5 * len(re.findall(name, text)))
        count += 1000 * (path.stem == f"test_{module}")
        own = path.relative_to(TESTS).parts[0] in OTHER_TESTS.get(room, (room,))
        if count:
            found.append((not own, -count, str(path)))
    return [path for _, _, path in sorted(found)][:FILES]


def judge(mutant: Mutant, room: str, folder: Path) -> dict[str, Any]:
    """Whether a test fails, which one, and after how long."""
    begin = time.monotonic()
    noticed: str | None = None
    slow: list[str] = []
    rooms = [str(TESTS / name) for name in OTHER_TESTS.get(room, (room,)) if (TESTS / name).is_dir()]
    for paths in (test_files(mutant, room), rooms):
        while paths and noticed is None:
            with _put_into(mutant, folder):
                noticed = _failing(paths, folder, slow)
            if noticed is None or not _is_slow(noticed, folder):
                break
            slow.append(_test_of(noticed))
            noticed = None
    return {"noticed_by": noticed, "seconds": round(time.monotonic() - begin)}


@contextlib.contextmanager
def _put_into(mutant: Mutant, folder: Path) -> Iterator[None]:
    copy = folder / "src" / "batchformer" / mutant.file
    copy.write_text(mutant.content, encoding="utf-8")
    yield
    shutil.copy(PACKAGE / mutant.file, copy)


def _test_of(noticed: str) -> str:
    return noticed.removesuffix(NO_END).partition("[")[0]


def _is_slow(noticed: str, folder: Path) -> bool:
    """Whether the test that did not end does not end without the fault either."""
    return noticed.endswith(NO_END) and _failing([str(ROOT / _test_of(noticed))], folder) is not None


def _failing(paths: list[str], folder: Path, without: Sequence[str] = ()) -> str | None:
    said = folder / "said"
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, str(folder / "src"))
        os.environ["PYTHONPATH"] = str(folder / "src")
        import pytest

        limit = ["-o", f"faulthandler_timeout={SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
        left_out = [f"--deselect={test}" for test in without]
        words = ["-x", "-v", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *limit, *left_out, *paths]
        os._exit(int(pytest.main(words)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):  # what a test had started
        os.killpg(child, signal.SIGKILL)
    if code in (0, 5):
        return None
    text = said.read_text(errors="replace")
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE):
        return failed[1].removeprefix(f"{ROOT}/")
    running = re.search(r"(\S+::\S+)(?!.*::)", text, re.S)
    return f"{running[1].removeprefix(f'{ROOT}/')}{NO_END}" if running else f"exit code {code}"


def seed_of(name: str) -> int:
    """The sample of an entry: nn-3 is of seed 0, nn-1.3 of seed 1."""
    seed, _, _ = name.rpartition("-")[2].rpartition(".")
    return int(seed or 0)


def table(record: dict[str, Any], seed: int) -> str:
    """The sample of a seed: what was noticed when it was drawn, where that was kept, and what is noticed today."""
    sample = {name: entry for name, entry in record.items() if seed_of(name) == seed}
    fresh = all("at_first" in entry for entry in sample.values())
    columns = ["faults", "equivalent", *["noticed when drawn"] * fresh, "noticed today", "not noticed"]
    rows = [f"| room | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    counts: dict[str, Counter[str]] = {}
    for name, entry in sorted(sample.items()):
        noticed = entry["noticed_by"] is not None
        equivalent = not noticed and "equivalent" in entry
        found = {"faults": 1, "equivalent": equivalent, "noticed when drawn": entry.get("at_first", False),
                 "noticed today": noticed, "not noticed": not (noticed or equivalent)}  # fmt: skip
        for room in (name.rpartition("-")[0], "all"):
            counts.setdefault(room, Counter(dict.fromkeys(found, 0))).update(found)
    total = counts.pop("all")
    rows += [f"| {room} | {' | '.join(str(c[column]) for column in columns)} |"
             for room, c in [*counts.items(), ("all", total)]]  # fmt: skip
    real = max(1, total["faults"] - total["equivalent"])
    told = f"{100 * total['noticed today'] / real:.1f} % of those that are not equivalent are noticed today"
    told += f", {100 * total['noticed when drawn'] / real:.1f} % were when they were drawn." if fresh else "."
    return "\n".join([*rows, "", told])


def main() -> int:
    rooms = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", choices=rooms, default=rooms)
    parser.add_argument("--each", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--equivalent", nargs=2, metavar=("NAME", "WHY"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if given.equivalent:
        record[given.equivalent[0]]["equivalent"] = given.equivalent[1]
        write_json(RECORD, record)
    if given.table or given.equivalent:
        print(*(table(record, seed) for seed in sorted({*map(seed_of, record)})), sep="\n\n")
        return 0
    import lightning
    import timm
    import torch
    import torchvision
    import transformers

    del lightning, timm, torchvision, transformers
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for name, entry in record.items() if given.again else ():
            room = name.rpartition("-")[0]
            ended = entry["noticed_by"] and not entry["noticed_by"].endswith(NO_END)
            if ended or "equivalent" in entry or room not in given.rooms:
                continue
            if mutant := find(entry, room):
                if entry["noticed_by"] and _is_slow(entry["noticed_by"], Path(folder)) and "at_first" in entry:
                    entry["at_first"] = False  # tests behind the slow one were not run: it counts as not noticed
                entry.update(judge(mutant, room, Path(folder)))
            else:
                entry["equivalent"] = "the code it was in is gone"
            write_json(RECORD, record)
            print(name, entry, flush=True)
        for number in range(0 if given.again else given.each):
            for room in given.rooms:
                name = f"{room}-{number}" if given.seed == 0 else f"{room}-{given.seed}.{number}"
                if name in record or time.monotonic() > end:
                    continue
                known = {_same(entry) for other, entry in record.items() if seed_of(other) != given.seed}
                new = (mutant for mutant in draw(room, given.seed) if _same(mutant._asdict()) not in known)
                mutant = next(itertools.islice(new, number, None))
                entry = judge(mutant, room, Path(folder))
                entry["at_first"] = entry["noticed_by"] is not None
                told = {key: value for key, value in mutant._asdict().items() if key != "content"}
                record[name] = {**told, **entry}
                write_json(RECORD, record)
                print(
                    name,
                    f"{mutant.file}:{mutant.line}",
                    repr(mutant.before),
                    "->",
                    repr(mutant.after),
                    entry,
                    flush=True,
                )
    print(table(record, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
