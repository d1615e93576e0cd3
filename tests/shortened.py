"""Runs and commands without what takes longest where the model is small, and changes no number.

    shortened.shorten(monkeypatch.setattr)        until a test ends
    shortened.shorten(setattr)                    from now on

Each test is run so (conftest.py), and so are the commands of processes.py, unless they are started
with is_shortened=False.
"""

from finetune import rl_files
from inference import weight_layouts
from run import finish

# tokens of a sample: more than the context of small_run.py
MOST = 40


def shorten(set_attribute) -> None:
    """No figures of a run, few tokens of a sample, and three rounds to find the fastest layout of
    a matrix."""
    set_attribute(finish, "plot_loss", lambda lines, title, path: path.touch())
    set_attribute(rl_files, "plot", lambda lines, path: path.touch())
    set_attribute(finish, "SAMPLE_TOKENS", MOST)
    set_attribute(weight_layouts, "SECONDS_TO_MEASURE", 0)
