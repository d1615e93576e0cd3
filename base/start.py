"""`python FILE`, or `python -m FOLDER.FILE`: a file of this project runs as a lesson or a command.

    if __name__ == "__main__":
        from base import start

        start.lesson("moe")

These lines stand at the top of a file, and do not return. The lesson imports the file as a module,
so nothing of it is there twice. PyTorch takes seconds to import; Ctrl-C ends the process quietly
from here on (interrupts.py).
"""

import gc
import importlib
import sys

from base import interrupts, terminal


def lesson(name: str, command: str = "") -> None:
    """Run the lesson of a module (of tuning.packing: lessons/packing.py) and leave. command: the
    module whose main(argv) runs where there are arguments that are not the lesson's."""
    interrupts.quiet()
    if command and not is_asked(sys.argv[1:]):
        run(command)
    form = imported("lessons.form")
    terminal.run(lambda: form.main(name))


def command(module: str) -> None:
    """Run main(argv) of a module and leave with what it returns."""
    interrupts.quiet()
    interrupts.end_with_launcher()
    run(module)


def run(module: str) -> None:
    main = imported(module).main
    terminal.run(lambda: main(sys.argv[1:]))


def imported(module: str):
    """The module. Nearly all that is imported stays, and PyTorch is much: the garbage collector,
    which would go through it again and again, takes a tenth of the time."""
    gc.disable()
    found = importlib.import_module(module)
    gc.freeze()
    gc.enable()
    return found


def is_asked(argv: list[str]) -> bool:
    """Whether these arguments, of a file that is a command too, start its lesson: none, or only
    the lesson's own. argv: without the file's name."""
    return all(word.startswith(("--quiz", "--why", "--without")) for word in argv[:1])
