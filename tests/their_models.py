"""Models of transformers: two narrow layers, random weights, the same each time."""

import pytest
import torch


def their_model(model_type: str, seed: int = 0, **fields):
    """fields: of its configuration; what this family does not have means nothing."""
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.AutoConfig.for_model(model_type, **shape | fields)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)
