"""Which hooks a run changes: what it learns, and from which data."""

from prompts.learning import PromptLearning, TemplateData
from prompts.prompt_data import PromptConfig
from tuning.adapter_learning import AdapterLearning
from tuning.preference_learning import DPOLearning, RewardLearning
from tuning.reinforcement import Reinforcement
from tuning.sft_data import ConversationData


def mixins(config) -> tuple[type, ...]:
    """The classes that come before train.Trainer. config: of the run, run.config.Config."""
    chosen = ()
    if config.prompt_config:
        learned = PromptConfig.read(config.prompt_config).learned
        # else the whole model learns from the same data: virtual_prompt_style fine-tuning
        chosen += (PromptLearning,) if learned else (TemplateData,)
    if config.sft:
        chosen += (ConversationData,)
    if config.preference:
        chosen += (RewardLearning if config.preference == "reward" else DPOLearning,)
    if config.rl:
        chosen += (Reinforcement,)
    if config.peft:
        chosen += (AdapterLearning,)
    return chosen
