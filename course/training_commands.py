"""The configuration class of each training command, so that a layout can be plain data:

config_of(dict(tp=2))                                                    train.py
config_of(dict(peft="lora", tp=2))                                       adapters.py
config_of(dict(command="preference.py", method="dpo", data=["-"]))       preference.py
"""

from finetune.adapter_learning import TextPeftConfig
from finetune.preference import PreferenceConfig
from finetune.prompt_tuning import PromptLearningConfig
from finetune.reinforcement import ReinforcementConfig
from finetune.sft import SFTConfig
from models.autoencoder_runs import AutoencoderRun
from models.clip_runs import CLIPRun
from models.diffusion_runs import DiTRun, UNetRun
from models.multimodal_runs import MultimodalRun
from models.picture_runs import ViTRun
from models.runs import BertRun, T5Run
from run.config import ConfigError, RunConfig, name_of
from run.pretraining import Config

COMMANDS = {
    config_class.name_in_messages(): config_class
    for config_class in (
        Config,
        TextPeftConfig,
        SFTConfig,
        PreferenceConfig,
        ReinforcementConfig,
        PromptLearningConfig,
        BertRun,
        T5Run,
        ViTRun,
        CLIPRun,
        DiTRun,
        UNetRun,
        AutoencoderRun,
        MultimodalRun,
    )
}


def config_of(fields: dict) -> RunConfig:
    """fields: of the configuration, and `command`, which may be left out for text."""
    fields = dict(fields)
    of_text = "adapters.py" if "peft" in fields else "train.py"
    return COMMANDS[fields.pop("command", of_text)](**fields)


def split(words: list[str]) -> tuple[type[RunConfig], list[str]]:
    """(configuration class, flags) of words that may begin with a command: -m finetune.sft --data
    ..; sft.py --data ..; the default is train.py. Raises ConfigError."""
    words = words[words[:1] == ["-m"] :]
    first = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    name = name_of(words[0]) if first else Config.command
    if name not in COMMANDS:
        raise ConfigError(f"{name}: is none of {', '.join(COMMANDS)}")
    return COMMANDS[name], words[first:]
