"""The two ways in which a run ends badly, each shown as one line and never as a traceback."""


class UsageError(Exception):
    """Arguments or input that cannot be used. The message names the field and a value that would work.

    The command line prints it and ends with status 2; nothing was written or lost.

    everywhere: all ranks see it in the same words, so one of them says it.
    """

    def __init__(self, message: str, same_on_all_ranks: bool = True):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks


class RunError(Exception):
    """Something went wrong while running; the last complete checkpoint stands. Status 1.

    everywhere: all ranks saw it in the same words, so one of them says it.
    """

    def __init__(self, message: str, same_on_all_ranks: bool = False):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks


class Diverged(RunError):
    """The game went where there are no numbers: the same again would end the same."""


class Interrupted(Exception):
    """A signal asked for the end, or too few ranks were left; a checkpoint was written first. Status 3, resumable.

    everywhere: as above.
    """

    def __init__(self, message: str, same_on_all_ranks: bool = True):
        super().__init__(message)
        self.same_on_all_ranks = same_on_all_ranks
