"""The default of --lr: of each kind of training, and of each preset.

    pretraining, by size    GPT-3's (arXiv 2005.14165, table 2.1): 125M 6e-4, .. 175B 6e-5
                            below 30M, which its table does not have: 3e-3
    presets                 as published: Llama 2 and 3, BLOOM; not with --load
    with --load             a tenth of the rate by size: --data, --sft, reward models
    --preference dpo, --rl  a hundredth of the rate by size
    --peft                  lora 2e-4, adapter 1e-3, ia3 3e-3, whatever the size; dpo and rl a tenth
    --prompt-config         0.03

They are where a search begins, not where it ends.
"""

import math

from model_config import least_parameters

# parameters -> rate
GPT_3 = {
    125e6: 6e-4,
    350e6: 3e-4,
    760e6: 2.5e-4,
    1.3e9: 2e-4,
    2.7e9: 1.6e-4,
    6.7e9: 1.2e-4,
    13e9: 1e-4,
    175e9: 6e-5,
}
SMALL, SMALL_RATE = 30e6, 3e-3
# arXiv 2307.09288, section 2.2; 2407.21783, table 3; 2211.05100, table 3
PUBLISHED = {
    "llama2-7b": 3e-4,
    "llama2-13b": 3e-4,
    "llama2-70b": 1.5e-4,
    "llama3.1-8b": 3e-4,
    "bloom-560m": 3e-4,
    "bloom-7b1": 1.2e-4,
}
# QLoRA, arXiv 2305.14314, appendix B.2; arXiv 1902.00751, section 3.1; 2205.05638, section 4.1
PEFT = {"lora": 2e-4, "adapter": 1e-3, "ia3": 3e-3}
PROMPTS = 0.03


def of_size(parameters: int) -> float:
    """For pretraining: the rate of the size that is nearest on a log scale."""
    if parameters < SMALL:
        return SMALL_RATE
    return GPT_3[min(GPT_3, key=lambda size: abs(math.log(size / parameters)))]


def default(config) -> tuple[float, str]:
    """(the peak rate of a run, words that say for what). config: run.config.Config. Raises its
    errors."""
    if config.prompt_config:
        from prompts.prompt_data import PromptConfig

        if PromptConfig.read(config.prompt_config).learned:
            return PROMPTS, "prompts"
    against_reference = config.preference == "dpo" or config.rl
    kind = f"--rl {config.rl}" if config.rl else "--preference dpo"
    if config.peft:
        rate, what = PEFT[config.peft], f"--peft {config.peft}"
        return (rate / 10, f"{kind} {what}") if against_reference else (rate, what)
    model = config.model_config()
    parameters = least_parameters(model)
    rate, what = of_size(parameters), f"a model of about {parameters / 1e6:,.1f} M parameters"
    as_published = config.num_layers is None and config.hidden_size is None
    if config.model in PUBLISHED and as_published and not config.load:
        rate, what = PUBLISHED[config.model], config.model
    if against_reference:
        return rate / 100, f"{kind} of {what}"
    return (rate / 10, f"fine-tuning {what}") if config.load else (rate, what)
