"""The error of a run that fails while it runs; what is refused before has errors of its own."""


class RunError(RuntimeError):
    """A run that failed on this rank alone, or with the same message on every rank."""

    def __init__(self, message: str, everywhere: bool = False):
        super().__init__(message)
        self.everywhere = everywhere
