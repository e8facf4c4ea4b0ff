"""`python -m sdm_compile`."""

import sys

from .cli import run

sys.exit(run())
