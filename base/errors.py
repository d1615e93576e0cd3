"""Errors that end a command with one message: bad input, or a run that fails."""


class InputError(ValueError):
    """Input that cannot be used. The message names it, and what would fit. A command ends with exit
    status 2."""


class RunError(RuntimeError):
    """A run that failed on this rank alone, or with the same message on every rank."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere


def cause(error: Exception) -> str:
    """The operating system's message for an error if it has one, else the exception's."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
