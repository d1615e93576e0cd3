"""Runs and commands without what takes longest where the model is small, and changes no number.

    shortened.shorten(monkeypatch.setattr)        until a test ends
    shortened.shorten(setattr)                    from now on

Each test is run so (conftest.py), and so are the commands of processes.py, unless they are started
with is_shortened=False.
"""

from run import finish
from tuning import rl_files

# tokens of a sample: more than the context of small_run.py
MOST = 40


def shorten(set_attribute) -> None:
    """No figures of a run, and few tokens of a sample."""
    set_attribute(finish, "plot_loss", lambda lines, title, path: path.touch())
    set_attribute(rl_files, "plot", lambda lines, path: path.touch())
    set_attribute(finish, "SAMPLE_TOKENS", MOST)
