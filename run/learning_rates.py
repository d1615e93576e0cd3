"""The default of --lr: of each size, of each preset, with --load.

    pretraining, by size    GPT-3's (arXiv 2005.14165, table 2.1): 125M 6e-4, .. 175B 6e-5
                            below 30M, which its table does not have: 3e-3
    presets                 as published: Llama 2 and 3, BLOOM; not with --load
    with --load             a tenth of the rate by size

Other kinds of training have their own (`default_lr` of their configuration). All are where a search
begins, not where it ends.
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


def of_size(parameters: int) -> float:
    """For pretraining: the rate of the size that is nearest on a log scale."""
    if parameters < SMALL:
        return SMALL_RATE
    return GPT_3[min(GPT_3, key=lambda size: abs(math.log(size / parameters)))]


def of_model(config) -> tuple[float, str]:
    """(the peak rate of pretraining its model, words that say for which). config:
    run.config.RunConfig. Raises its errors."""
    model = config.model_config()
    parameters = least_parameters(model)
    as_published = config.num_layers is None and config.hidden_size is None
    if config.model in PUBLISHED and as_published and not config.load:
        return PUBLISHED[config.model], config.model
    return of_size(parameters), f"a model of about {parameters / 1e6:,.1f} M parameters"


def default(config) -> tuple[float, str]:
    """The same for a run on its whole model: fine-tuning has a tenth of the rate."""
    rate, what = of_model(config)
    return (rate / 10, f"fine-tuning {what}") if config.load else (rate, what)
