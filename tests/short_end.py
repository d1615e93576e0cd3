"""The end of a run without what takes longest in a small one: the figure, and most of the sample.

    short_end.shorten(monkeypatch.setattr)        runs of this process, until the test ends
    short_end.shorten(setattr)                    all later ones

Each test is run so (conftest.py), and so are the commands of processes.py. A test of the end itself
takes the fixture `whole_end`, or starts its command with whole_end=True.
"""

from types import SimpleNamespace

import generate
from runtime import finish

# more than the context of small_run.py
MOST = 40


def generate_few(model, prompts, n, **options):
    return generate.generate(model, prompts, min(n, MOST), **options)


def shorten(set_attribute) -> None:
    set_attribute(finish, "generate", SimpleNamespace(generate=generate_few))
    set_attribute(finish, "plot_loss", lambda lines, title, path: path.touch())
