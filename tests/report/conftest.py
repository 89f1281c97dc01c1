"""Tests are imported by path (importlib mode): make the helper beside them importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
