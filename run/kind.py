"""What a kind of training says for itself, beside its flags: its command, rules, task, bytes.

`RunConfig` (config.py) says it for a whole model; each kind of training changes what is otherwise
there (pretraining.py, and finetune/).
"""

from base.model_config import MoEConfig
from run.presets import default_lr


def name_of(command: str) -> str:
    """The file: sft.py, of -m finetune.sft; "" of no word."""
    word, *_ = command.removeprefix("-m ").split() or [""]
    if not word:
        return ""
    return word.rpartition("/")[2] if word.endswith(".py") else f"{word.rpartition('.')[2]}.py"


class Kind:
    # how it is started, after python or torchrun; and what it does, for --help
    command = "train.py"
    purpose = "Train a GPT."
    # flags that do something only beside others, as in run/rules.py
    needs = ()
    # whether dropout is that of the preset or of --load; else it is 0 unless it is given
    keeps_dropout = True
    # rows that one micro-batch holds at least
    least_rows = 1
    # whether --as-rank can ask what a rank would do
    can_be_asked = False

    @classmethod
    def speaker(cls) -> str:
        """The file of its command, which begins each message."""
        return name_of(cls.command)

    def task(self):
        """What is learned: a run.task.Task. Raises InputError."""
        raise NotImplementedError

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        """The rules of this kind alone, after those of every run (rules.validate has the
        arguments). Raises ConfigError."""

    @property
    def value_head(self) -> bool:
        """Whether the model gives a number for each token in the place of logits."""
        return False

    @property
    def frozen(self) -> bool:
        """Whether the weights of --load stay as they are, and are not in the run's checkpoints."""
        return False

    @property
    def unpredicted(self) -> str:
        """Why --plan cannot predict a step; "": it can."""
        return ""

    def default_lr(self) -> tuple[float, str]:
        """(--lr where it is not given, words that say for what)"""
        return default_lr(self)

    def bytes_beside(self, model: MoEConfig, precision: str, ranks: dict, learner: int) -> int:
        """Bytes of other models than the one that learns, whose state has `learner` bytes. ranks:
        as in room.state_parts."""
        return 0

    def known_micro_batch(self, dp: int) -> int:
        """What a rank has to hold at once, as far as it is known before the data."""
        return self.micro_batch(dp)
