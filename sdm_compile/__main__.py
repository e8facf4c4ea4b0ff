"""`python -m sdm_compile`."""

import sys

from .cli import main

sys.exit(main())
