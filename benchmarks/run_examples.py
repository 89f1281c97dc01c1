"""Run the scripts of examples/ and keep what they print and draw, for the pages of the documentation.

    python -m benchmarks.run_examples build/examples

A script that was run before and has not changed since, nor the package, is not run again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def state_of(script: Path) -> str:
    """What the output of a script depends on: its source and that of the package."""
    files = [script, *sorted((ROOT / "src").rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def run(script: Path, folder: Path) -> None:
    """Run `script` in `folder`, where it leaves its pictures, and keep what it prints in `printed.txt`."""
    stamp, state = folder / "state", state_of(script)
    if stamp.is_file() and stamp.read_text() == state:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{script.name} ended with code {done.returncode}:\n{done.stderr}")
    (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")
    stamp.write_text(state)
    print(f"{script.name}: run", flush=True)


def main(out: Path) -> None:
    for script in sorted((ROOT / "examples").glob("*.py")):
        run(script, out / script.stem)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
