"""Errors that end a command with one message: of bad input, and of a run that fails."""


class InputError(ValueError):
    """What the user gave cannot be used; the message says what, and what would fit. A command ends
    with exit status 2."""


class RunError(RuntimeError):
    """A run that failed on this rank alone, or with the same message on every rank."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere
