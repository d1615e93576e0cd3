"""Every kind of training by its command, so that a layout can be plain data:

config_of(dict(tp=2))                                                   train.py
config_of(dict(peft="lora", tp=2))                                      adapters.py train
config_of(dict(command="preference.py", method="dpo", data=["-"]))      preference.py
"""

from prompts.learning import PromptLearningConfig
from run.config import ConfigError, RunConfig
from run.pretraining import Config
from tuning.adapter_training import TextPeftConfig
from tuning.preference_command import PreferenceConfig
from tuning.reinforcement_command import ReinforcementConfig
from tuning.sft_command import SFTConfig

KINDS = {
    kind.command: kind
    for kind in (
        Config,
        TextPeftConfig,
        SFTConfig,
        PreferenceConfig,
        ReinforcementConfig,
        PromptLearningConfig,
    )
}


def config_of(fields: dict) -> RunConfig:
    """fields: of the configuration, and `command`, which may be left out for text."""
    fields = dict(fields)
    of_text = "adapters.py train" if "peft" in fields else "train.py"
    return KINDS[fields.pop("command", of_text)](**fields)


def split(words: list[str]) -> tuple[type[RunConfig], list[str]]:
    """(kind, flags) of words that may begin with a command: sft.py --data ..; python adapters.py
    train ..; the default is train.py. Raises ConfigError."""
    first = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    command = " ".join(words[:first]).removeprefix("python ") or "train.py"
    if command not in KINDS:
        raise ConfigError(f"{command}: is none of {', '.join(KINDS)}")
    return KINDS[command], words[first:]
