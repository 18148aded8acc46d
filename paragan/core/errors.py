"""The errors that end a run. Each is shown as one line, never as a traceback.

`same_on_all_ranks` says that every rank raises the error with the same words, so only one of them prints it.
"""


class UsageError(Exception):
    """Arguments or input that cannot be used. Status 2; nothing was written or lost.

    The message names the field as the user types it and a value that would work: "--batch=30: not a multiple of
    --lanes 8. Use 24 or 32."
    """

    def __init__(self, message: str, same_on_all_ranks: bool = True):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks


class RunError(Exception):
    """A failure while running. Status 1; the last complete checkpoint is intact."""

    def __init__(self, message: str, same_on_all_ranks: bool = False):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks


class DeviceOutOfMemory(RunError):
    """A round does not fit into the memory of the device. Status 2; the message names settings that fit."""


class Diverged(RunError):
    """Training diverged to values that are not finite; the same run again would end the same way."""


class InterruptedBeforeStart(KeyboardInterrupt):
    """A signal ended a rank that has not met the others. Status 3; each such rank says so, since no other one can."""


class Interrupted(Exception):
    """A signal asked the run to stop, or too few ranks were left. Status 3; resumable, a checkpoint was written."""

    def __init__(self, message: str, same_on_all_ranks: bool = True):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks
