"""`python -m paragan` is `paragan`."""

import sys

from .cli import main

sys.exit(main())
