"""What happens when things go wrong, as numbers: kills, full disks, damaged and hostile files, large folders, memory.

    python -m benchmarks.reliability [--only CHECK ...] [--seed 0] [--kills 20] [--steps 1000]

Every check counts what it tried and what held. Its row goes to benchmarks/results/reliability.json as soon as it is
done, and from there into docs/reliability.md; the other rows stay as they were. All of it is embedded or generated data
on the CPU, with one thread, so that the same training gives the same bits. Commands run in processes forked after the
imports: what is measured does not wait for these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from batchformer.cli import main as command
from batchformer.data.sets import write_miniature
from batchformer.training.task import Task
from benchmarks import mutants
from benchmarks._bad_files import damaged_images, hostile_checkpoint, hostile_glb, hostile_npz, hostile_pickle
from benchmarks._common import RESULTS, machine, write_json
from benchmarks.unchanged import DETECTOR, HEADS

RECORD, PAGE = RESULTS / "reliability.json", Path(__file__).parents[1] / "docs" / "reliability.md"
FAMILIES = {
    "long tail": "digits-lt",
    "RIDE": "digits-lt --model.algorithm ride",
    "PaCo": "digits-lt --model.algorithm paco",
    "BALMS": "digits-lt --model.algorithm balms --model.balms.meta_batch 64",
    "V2 in a ViT": "vit-digits --model.backbone_args.depth 2 --model.batchformer.blocks [0,1]",
    "unseen domains": "digits-domains --data.steps_per_epoch 7",
    "adaptation": "mnist-usps --data-root {mnist-usps-svhn} --data.steps_per_epoch 7 --data.batch_size 8",
    "unseen pairs": "digits-states --trainer.limit_train_batches 7",
    "unseen classes (GAN)": "digits-gzsl --trainer.limit_train_batches 7 --model.softmax.epochs 2",
    "MoCo": "moco-digits --trainer.limit_train_batches 7",
    "MAE": "mae-digits --trainer.limit_train_batches 7",
    "detection": f"coco128-detr --data-root {{coco}} {DETECTOR}",
    "panoptic": f"coco128-panoptic --data-root {{coco-panoptic}} {DETECTOR} {HEADS} --model.train joint",
    "hands": "hands-tiny --data.train_images 56 --data.test_images 8 --data.batch_size 8 --data.eval_batch_size 8",
}
SHORT = "--trainer.accelerator cpu --trainer.check_val_every_n_epoch 1 --no-analysis --run.threads 1"


Rows = Iterator[tuple[str, "Held"]]


class Ended(NamedTuple):
    code: int
    said: str
    killed: bool


class Held(NamedTuple):
    """One row: what was tried, how often, how often it held, and what else was measured."""

    tried: int
    held: int
    what: str
    failures: list[str]


def run(words: Sequence[str], kill_after: float | None = None, before: Callable[[], None] | None = None) -> Ended:
    """One command in a process of its own; killed after so many seconds if it has not ended by then."""
    with tempfile.TemporaryFile() as said:
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 70
            try:
                if before is not None:
                    before()
                code = command(list(words))
            except BaseException as problem:
                print(f"Traceback of {type(problem).__name__}: {problem}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                os._exit(code)
        end = None if kill_after is None else time.monotonic() + kill_after
        status, killed = os.waitpid(child, os.WNOHANG if end else 0), False
        while end and not status[0]:
            if time.monotonic() >= end:
                os.killpg(child, signal.SIGKILL)
                status, killed = os.waitpid(child, 0), True
                break
            time.sleep(0.005)
            status = os.waitpid(child, os.WNOHANG)
        said.seek(0)
        return Ended(os.waitstatus_to_exitcode(status[1]), said.read().decode(errors="replace"), killed)


def one_sentence(ended: Ended) -> bool:
    """Refused with a message that was written for it: no traceback, no error of a library passed on."""
    told = "batchformer: " in ended.said and "--debug to see where" not in ended.said
    return ended.code not in (0, 70) and told and "Traceback" not in ended.said


def bits(folder: Path) -> str:
    """A hash of all weights and measures in a run folder, or in those of a comparison."""
    digest = hashlib.sha256()
    for checkpoint in sorted(folder.rglob("last.ckpt")):
        state = torch.load(checkpoint, weights_only=True)["state_dict"]
        for key in sorted(state):
            digest.update(key.encode() + state[key].flatten().view(torch.uint8).numpy().tobytes())
        result = json.loads((checkpoint.parents[1] / "result.json").read_text())
        digest.update(json.dumps(result["metrics"], sort_keys=True).encode())
    return digest.hexdigest()


class Place:
    """A temporary folder with the generated data sets that were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def words(self, text: str) -> list[str]:
        for name in re.findall(r"{([\w-]+)}", text):
            root = self.folder / "data" / name
            if not root.exists():
                write_miniature(name, root)
            text = text.replace(f"{{{name}}}", str(root))
        return text.split()

    def new(self, name: str) -> Path:
        path = self.folder / re.sub(r"\W+", "-", name)
        shutil.rmtree(path, ignore_errors=True)
        return path


def _came_through(finished: int, equal: int) -> str:
    """What became of the trainings that were killed and resumed."""
    trainings = "1 training was" if finished == 1 else f"{finished} trainings were"
    bits_of = "with the bits of one never killed"
    return f"{trainings} resumed to the end, {bits_of if equal == finished else f'{equal} of them {bits_of}'}"


def kills(place: Place, given: argparse.Namespace) -> Rows:
    """SIGKILL at random moments; what is left is resumed, until it ends, and must have the bits of a whole run."""
    compare = "digits-lt --seeds 2 --trainer.max_epochs 2"
    cases = {"compare": ("compare", compare)}
    cases |= {name: ("fit", f"{text} --trainer.max_epochs 3") for name, text in FAMILIES.items()}
    for name, (verb, text) in cases.items():
        if given.family and name not in given.family:
            continue
        draw, failures = random.Random(f"{given.seed} {name}"), []
        words = [verb, *place.words(text), *SHORT.split(), "--run.checkpoint_every_steps", "3", "--out"]
        whole, out = place.new("whole"), place.new("killed")
        begin = time.monotonic()
        ended = run([*words, str(whole)])
        duration = time.monotonic() - begin
        if ended.code:
            yield f"killed and resumed: {name}", Held(0, 0, "", [ended.said[-400:]])
            continue
        expected, killed, finished, equal = bits(whole), 0, 0, 0
        while killed < given.kills or finished == 0 or out.exists():
            resume = ["--resume"] if (out / "config.yaml").exists() or (out / "compare.json").exists() else []
            resume = resume or (["--overwrite"] if out.exists() else [])
            wait = draw.uniform(0, duration) if killed < given.kills else None
            ended = run([*words, str(out), *resume], wait)
            killed += ended.killed
            if ended.killed:
                continue
            if ended.code:
                failures.append(ended.said[-400:])
                break
            finished += 1
            same = bits(out) == expected
            equal += same
            failures += [] if same else [f"other bits after {killed} kills"]
            out = place.new("killed")
        held = 0 if failures else killed
        yield f"killed and resumed: {name}", Held(killed, held, _came_through(finished, equal), failures)


def two_commands(place: Place, given: argparse.Namespace) -> Rows:
    """Several commands into one folder at once: one trains, the others are refused, and the run is whole."""
    held, failures = 0, []
    for number in range(10):
        out = place.new("shared")
        words = ["fit", "digits-lt", *SHORT.split(), "--trainer.max_epochs", "4", "--out", str(out)]
        extra = (["--overwrite"], ["--resume"], [])[number % 3]
        children = []
        for index in range(3):
            if (child := os.fork()) == 0:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                code = 70
                try:
                    code = command([*words, *(extra if index else [])])
                finally:
                    os._exit(code)
            children.append(child)
            time.sleep(0.02 * index)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        whole = (out / "result.json").exists() and codes[0] == 0 and 70 not in codes
        whole = whole and sum(code == 0 for code in codes) == 1
        held += whole
        failures += [] if whole else [f"exit codes {codes} with {extra}"]
    yield "three commands in one folder", Held(10, held, "one trains, the others are refused", failures)


def disks(place: Place, given: argparse.Namespace) -> Rows:
    """A disk that is full after so many kilobytes, and one that cannot be written; then resumed with room."""
    root = place.new("disk")
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(root)], capture_output=True).returncode:
        yield "full and read-only disk", Held(0, 0, "not tried: mounting a small disk needs root", [])
        return
    try:
        words = ["fit", "digits-lt", *SHORT.split(), "--trainer.max_epochs", "2", "--out"]
        run([*words, str(root / "whole")])
        expected, held, failures = bits(root / "whole"), 0, []
        sizes = [random.Random(f"{given.seed} {number}").randrange(0, 3000) for number in range(12)]
        for kilobytes in sizes:
            shutil.rmtree(root / "run", ignore_errors=True)
            free = shutil.disk_usage(root).free
            (root / "filler").write_bytes(bytes(max(0, free - 1024 * kilobytes)))
            first = run([*words, str(root / "run")])
            (root / "filler").unlink()
            left = list((root / "run").rglob("*.partial")) if (root / "run").exists() else []
            again = ["--resume"] if (root / "run" / "config.yaml").exists() else ["--overwrite"]
            second = run([*words, str(root / "run"), *again]) if first.code else first
            good = (first.code == 0 or (one_sentence(first) and not left)) and second.code == 0
            good = good and bits(root / "run") == expected
            held += good
            failures += [] if good else [f"{kilobytes} kB: {first.said[-300:]} / {second.said[-300:]}"]
        yield (
            "full disk",
            Held(len(sizes), held, "refused in a sentence, nothing half-written, resumed: same bits", failures),
        )
        (root / "run" / "result.json").unlink()  # as if it had not ended
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        tries = {
            "fit": [*words, str(root / "other")],
            "resume": [*words, str(root / "run"), "--resume"],
            "overwrite": [*words, str(root / "run"), "--overwrite"],
            "export": ["export", str(root / "run"), "--out", str(root / "model.safetensors")],
            "report": ["report", str(root / "run"), "--out", str(root / "page.html")],
        }
        ended = {name: run(words) for name, words in tries.items()}
        good_ones = [name for name, end in ended.items() if one_sentence(end)]
        failures = [f"{name}: {end.said[-300:]}" for name, end in ended.items() if name not in good_ones]
        yield "read-only disk", Held(len(tries), len(good_ones), ", ".join(tries) + ": a sentence each", failures)
    finally:
        subprocess.run(["umount", str(root)], check=False)


def images(place: Place, given: argparse.Namespace) -> Rows:
    """Predictions for damaged images: a class or the reason for each file, and the rest goes on."""
    folder, trained = place.new("damaged"), place.new("trained")
    folder.mkdir()
    run(["fit", "digits-lt", *SHORT.split(), "--trainer.max_epochs", "1", "--out", str(trained)])
    kinds = damaged_images()
    for number, (ending, content) in enumerate(kinds.values()):
        (folder / f"{number:02}.{ending}").write_bytes(content)
    ended = run(["predict", str(trained), str(folder), "--out", str(place.folder / "rows.csv")])
    rows = (place.folder / "rows.csv").read_text() if (place.folder / "rows.csv").exists() else ""
    answered = [name for number, name in enumerate(kinds) if f"{number:02}." in rows]
    failures = [] if "Traceback" not in ended.said else [ended.said[-400:]]
    failures += [name for name in kinds if name not in answered]
    what = f"{len(kinds)} kinds in one folder: each has a class or a reason, exit code {ended.code}"
    yield "damaged images", Held(len(kinds), len(answered) if ended.code not in (0, 70) else 0, what, failures)


def hostile(place: Place, given: argparse.Namespace) -> Rows:
    """Files that run a command when they are unpickled, or name files outside: refused, and nothing was run."""
    root, mark = place.new("hostile"), place.folder / "was-run"
    root.mkdir()
    hostile_checkpoint(root / "weights.pth", mark)
    short = [*SHORT.split(), "--trainer.max_epochs", "1"]
    trained = place.new("trained")
    run(["fit", "digits-lt", *short, "--out", str(trained)])
    hostile_checkpoint(trained / "checkpoints" / "last.ckpt", mark)
    (trained / "result.json").unlink()  # as if it had not ended
    for name in ("mit-states", "xlsa17", "features", "freihand"):
        write_miniature(name, root / name)
    for path in (root / "mit-states").rglob("*.t7"):
        hostile_checkpoint(path, mark)
    for path in (root / "xlsa17").rglob("*.mat"):
        hostile_pickle(path, mark)
    hostile_npz(root / "features/features.npz", mark, ("features", "labels", "att", "allclasses", "trainval_loc"))
    for path in (root / "freihand").rglob("MANO_RIGHT.pkl"):
        hostile_pickle(path, mark)
    hostile_npz(root / "words.npz", mark, ("words", "vectors"))
    hostile_glb(root / "rig.glb")
    write_miniature("plantvillage-czsl", root / "pairs")
    metadata = json.loads((root / "pairs/metadata.json").read_text())
    metadata[0]["image"] = "../../../../../../etc/hostname"
    (root / "pairs/metadata.json").write_text(json.dumps(metadata))
    out = ["--out", str(place.new("out"))]
    tries = {
        "weights (.pth)": ["fit", "digits-lt", "--init-from", str(root / "weights.pth"), *short, *out],
        "checkpoint (test)": ["test", str(trained)],
        "checkpoint (export)": ["export", str(trained), "--out", str(root / "model.safetensors")],
        "checkpoint (resume)": ["fit", "digits-lt", *short, "--resume", "--out", str(trained)],
        ".t7": ["fit", "mit-states-cge", "--data-root", str(root / "mit-states"), *short, *out],
        ".mat": ["fit", "cub-ce-gzsl", "--data-root", str(root / "xlsa17"), *short, *out],
        "features (.npz)": ["fit", "cub-gzsl", "--data-root", str(root / "features" / "features.npz"), *short, *out],
        "word vectors (.npz)": ["fit", "digits-states", "--data.words", f"[{root / 'words.npz'}]", *short, *out],
        "MANO's pickle": ["fit", "freihand-graphormer", "--data-root", str(root / "freihand"), *short, *out],
        "GLB": ["fit", "hands-tiny", "--data.rig", str(root / "rig.glb"), *short, *out],
        "metadata": ["fit", "plantvillage-czsl", "--data-root", str(root / "pairs"), *short, *out],
    }
    failures = []
    for name, words in tries.items():
        ended = run(words)
        if mark.exists() or not one_sentence(ended):
            failures.append(f"{name}: {'its command was run. ' if mark.exists() else ''}{ended.said[-300:]}")
            mark.unlink(missing_ok=True)
    what = ", ".join(tries) + ": refused, nothing run"
    yield "hostile files", Held(len(tries), len(tries) - len(failures), what, failures)


def names(place: Place, given: argparse.Namespace) -> Rows:
    """Class names that are HTML stay text in the page."""
    from PIL import Image

    root, out = place.new("names"), place.new("named")
    kinds = ("<script>alert(1)<!script>", "<img src=x onerror=alert(1)>", "a&b", 'quote"quote', "it's")
    for part, count in (("train", 6), ("val", 3)):
        for label, kind in enumerate(kinds):
            folder = root / part / kind.replace("/", "!")
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (40 * label, 10 * number, 90)).save(folder / f"{number}.png")
    words = ["--data-root", str(root), "--data.image_size", "32", "--data.batch_size", "8", "--data.workers", "0"]
    words += ["--model.backbone", "test_resnet", "--init-from", "scratch"]
    ended = run(["fit", "folder-lt", *words, *SHORT.split(),
                 "--trainer.max_epochs", "1", "--out", str(out)])  # fmt: skip
    page = place.folder / "page.html"
    ended = run(["report", str(out), "--out", str(page)]) if not ended.code else ended
    text = page.read_text() if page.exists() else ""
    failures = [kind for kind in kinds if kind.startswith("<") and (kind in text or not text)]
    failures += [ended.said[-300:]] if ended.code else []
    yield "HTML in class names", Held(len(kinds), len(kinds) - len(failures), "escaped in the page", failures)


def large_folder(place: Place, given: argparse.Namespace) -> Rows:
    """100,000 images in 1,000 classes: the time from the command to the first training step."""
    from PIL import Image

    root, count = place.new("large"), 100_000
    (root / "images").mkdir(parents=True)
    for number in range(10):
        Image.new("RGB", (64, 64), (number * 20, 80, 200)).save(root / "images" / f"{number}.jpg")
    for label in range(1000):
        for part, images_of in (("train", count // 1000), ("val", 1)):
            folder = root / part / f"class-{label:04}"
            folder.mkdir(parents=True)
            for number in range(images_of):
                os.link(root / "images" / f"{(label + number) % 10}.jpg", folder / f"{number}.jpg")
    begin, told = time.monotonic(), place.folder / "seconds"

    def stop_at_first_step() -> None:
        def step(self: Task, batch: Any, batch_idx: int) -> None:
            told.write_text(str(time.monotonic() - begin))
            os._exit(0)

        Task.on_train_batch_start = step  # type: ignore[method-assign]

    words = ["fit", "folder-lt", "--data-root", str(root), "--data.image_size", "64", "--data.batch_size", "32"]
    words += [
        "--model.backbone",
        "test_resnet",
        "--init-from",
        "scratch",
        *SHORT.split(),
        "--out",
        str(place.new("out")),
    ]
    ended = run(words, before=stop_at_first_step)
    seconds = float(told.read_text()) if told.exists() else None
    failures = [] if seconds is not None and seconds < 60 else [ended.said[-400:]]
    what = "not started" if seconds is None else f"first step after {seconds:.0f} s"
    yield "a folder of 100,000 images", Held(1, int(not failures), what, failures)


def _watch_memory(told: Path, steps: Sequence[int]) -> None:
    """Write down the resident memory, in MiB, at the begin of these steps."""
    begin, page = Task.on_train_batch_start, os.sysconf("SC_PAGE_SIZE")

    def step(self: Task, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in steps:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20
            with told.open("a") as file:
                file.write(f"{self.trainer.global_step} {resident}\n")
        begin(self, batch, batch_idx)

    Task.on_train_batch_start = step  # type: ignore[method-assign]


def memory(place: Place, given: argparse.Namespace) -> Rows:
    """Resident memory over many steps of every family: after two fifths, when all has run once, it grows by < 1 %."""
    for name, text in FAMILIES.items():
        if given.family and name not in given.family:
            continue
        told = place.folder / "resident"
        told.unlink(missing_ok=True)

        words = ["fit", *place.words(text), *SHORT.split(), "--trainer.max_steps", str(given.steps)]
        words += [
            "--trainer.max_epochs",
            "-1",
            "--trainer.check_val_every_n_epoch",
            "20",  # so that evaluations, which need memory of their own, come before the first reading
            "--out",
            str(place.new("out")),
        ]
        ended = run(words, before=partial(_watch_memory, told, (2 * given.steps // 5, given.steps - 1)))
        lines = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
        seen = {int(step): float(value) for step, value in lines}
        if ended.code or len(seen) < 2:
            yield f"memory: {name}", Held(1, 0, "not measured", [ended.said[-400:]])
            continue
        first, last = (seen[step] for step in sorted(seen))
        what = f"{first:.0f} MiB at step {min(seen)}, {last:.0f} MiB at step {max(seen)}"
        flat = last < first * 1.01
        yield f"memory: {name}", Held(1, int(flat), what, [] if flat else ["it grows"])


def _tests(place: Place, what: str, *words: str) -> Held:
    """The outcome of some of the tests."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *words],
        cwd=PAGE.parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    count = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", ended.stdout)}
    tried = sum(count.values())
    return Held(tried, count.get("passed", 0), what, re.findall(r"^FAILED (\S+)", ended.stdout, re.MULTILINE))


def models(place: Place, given: argparse.Namespace) -> Rows:
    """Every model of the behaviour suite, attached and detached."""
    from tests.behaviour.cases import CASES

    what = f"tests of {len(CASES)} models: attached, trained, detached without a trace, compiled, exported"
    yield "models attached and detached", _tests(place, what, "tests/behaviour")


PROCESS_TESTS = ("tests/cli/test_two_processes.py", "tests/cli/test_families_in_processes.py")


def processes(place: Place, given: argparse.Namespace) -> Rows:
    """N processes against one, on gloo."""
    what = "tests of two and more processes against one: outputs, gradients, trainings"
    yield "N processes = 1", _tests(place, what, "tests/parallel", *PROCESS_TESTS)


CHECKS: dict[str, Callable[[Place, argparse.Namespace], Rows]] = {
    "kills": kills,
    "two-commands": two_commands,
    "disks": disks,
    "images": images,
    "hostile": hostile,
    "names": names,
    "large-folder": large_folder,
    "memory": memory,
    "models": models,
    "processes": processes,
}


CHOSEN_BY_SCRIPT = (
    "The script chose the tests to run for every fault. Rooms have unequal numbers of faults where the\n"
    "draw was stopped by a time limit:"
)
DRAWS = {
    0: "Tests for its survivors were added before this table was made:",
    1: "Faults with slow tests are rarer here than in draw 1, and for most faults the tests to run were chosen\n"
    "by reading the fault:",
}


def page(record: dict[str, Any]) -> str:
    """The text of docs/reliability.md."""
    lines = [
        "# Reliability",
        "",
        "Stress tests and how often they passed, run by `make reliability` (`python -m benchmarks.reliability`), which",
        "writes `benchmarks/results/reliability.json` and this page. All on a CPU, with embedded and generated data.",
        "",
        "*Killed and resumed*: a training of the family, or `compare`, gets SIGKILL at a random moment and is resumed,",
        "until it ends; then it starts again, until there were 20 kills. It passes if every training ends with the",
        "weights and measures, bit for bit, of one that was never killed.",
        "",
        "| test | runs | passed | |",
        "|---|---|---|---|",
    ]
    for name, row in record["rows"].items():
        text = row["what"] + ("; failed: " + "; ".join(row["failures"]) if row["failures"] else "")
        lines.append(f"| {name} | {row['tried']:,} | {row['held']:,} | {' '.join(text.replace('|', '/').split())} |")
    if mutants.RECORD.is_file():
        told = (
            "Random faults are inserted into the package, one at a time, to see whether a test fails (`python -m",
            "benchmarks.mutants`, `benchmarks/results/mutants.json`). Equivalent faults change nothing observable;",
            "this was judged by reading, and the file gives the reason. Each draw is of faults that no other has.",
            "Tests for those that were not noticed are added after a draw, so judge by the share noticed when drawn.",
        )
        faults = json.loads(mutants.RECORD.read_text())
        lines += ["", "## Mutation testing", "", *told]
        for seed in sorted({*map(mutants.seed_of, faults)}, reverse=True):
            lines += ["", f"Draw {seed + 1}. {DRAWS.get(seed, CHOSEN_BY_SCRIPT)}", "", mutants.table(faults, seed)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--family", nargs="*", help="of kills and memory: these families alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    given = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}
    failed = False
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name in given.only:
            for title, row in CHECKS[name](Place(Path(folder)), given):
                failed |= row.held < row.tried or not row.tried
                record["rows"][title] = row._asdict()
                print(f"{title}: {row.held} of {row.tried}; {row.what}", *row.failures, sep="\n  ", flush=True)
                write_json(RECORD, {**machine(), "rows": record["rows"]})
                PAGE.write_text(page(record), encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
