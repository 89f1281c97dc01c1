"""``python -m batchformer.cli``."""

import sys

from batchformer.cli import main

sys.exit(main())
