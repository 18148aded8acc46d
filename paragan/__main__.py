"""`python -m paragan` is `paragan`."""

import os
import signal

if "PARAGAN_LAUNCHER" in os.environ:  # a rank of --ranks: Ctrl-C before it has handlers ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from paragan.cli.main import entry_point

entry_point()
