"""Which task a run has: what it learns, from which data, and which parameters learn."""

from prompts.learning import PromptParameters, PromptTask, TemplateTask
from prompts.prompt_data import PromptConfig
from run.task import Task, WholeModel
from tuning.adapter_learning import Adapters
from tuning.preference_learning import DPOTask, RewardTask
from tuning.reinforcement_learning import ReinforcementTask
from tuning.sft_data import ConversationTask


def task_of(config) -> Task:
    """config: of the run, run.config.Config."""
    learned = Adapters() if config.peft else WholeModel()
    if config.rl:
        return ReinforcementTask(learned)
    if config.preference:
        return (RewardTask if config.preference == "reward" else DPOTask)(learned)
    if config.sft:
        return ConversationTask(learned)
    if not config.prompt_config:
        return Task(learned)
    prompts = PromptConfig.read(config.prompt_config)
    if prompts.learned:
        return PromptTask(PromptParameters(prompts))
    # the whole model learns from the same data: virtual_prompt_style fine-tuning
    return TemplateTask(learned)
