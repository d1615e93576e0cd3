"""Models of transformers: two narrow layers, random weights, the same each time."""

import re

import pytest
import torch

SHAPE = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)


def their_config(model_type: str, **fields):
    """fields: beside those of SHAPE; what this family does not have means nothing."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(model_type, **SHAPE | fields)


def their_model(model_type: str, seed: int = 0, **fields):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(their_config(model_type, **fields))


@torch.no_grad()
def shaken(model, but: str = "nothing"):
    """Norms and biases away from 1 and 0, so that a swap shows. but: names of what stays."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if not re.search(but, name):
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.eval()
