"""`python -m paragan` is `paragan`. Ctrl-C while modules are imported ends the process without a traceback."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from paragan.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
