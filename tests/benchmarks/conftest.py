"""The made-up result files of tests/report are those of these tests, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
