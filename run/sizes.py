"""How large a model is, counted from its configuration: parameters and FLOPs.

    python -m run.presets        every preset: parameters and GFLOP for each token

`config` is a GPTConfig, or a MoEConfig with experts.
"""

from model_config import GPTConfig


def num_mlps(config: GPTConfig, of_each_layer_with_experts: str) -> tuple[int, int]:
    """(MLPs of the whole model, layers with experts). A layer with experts counts as many MLPs as
    the named field says: num_experts, or router_topk, those that one token goes through."""
    experts = len(getattr(config, "expert_layers", ()))
    each = getattr(config, of_each_layer_with_experts, 0)
    return config.num_layers - experts + experts * each, experts


def block_matrices(config: GPTConfig, mlps: int) -> int:
    """Numbers in the matrices of all blocks, routers left out."""
    h = config.hidden_size
    heads = config.num_heads + config.num_kv_heads
    attention = 2 * h * heads * config.head_dim
    return config.num_layers * attention + mlps * mlp_matrices(config)


def mlp_matrices(config: GPTConfig) -> int:
    """Numbers in the matrices of one MLP, or of one expert."""
    return (3 if config.gated else 2) * config.hidden_size * config.ffn_hidden_size


def least_parameters(config: GPTConfig) -> int:
    """Numbers in a model's matrices; norms and biases are left out. Exact for any shape, without
    building it."""
    h = config.hidden_size
    mlps, experts = num_mlps(config, "num_experts")
    routers = experts * h * getattr(config, "num_experts", 0)
    vectors = config.vocab_size * (1 if config.tied else 2)
    if config.positions == "learned":
        vectors += config.seq_length
    return block_matrices(config, mlps) + routers + h * vectors


def flops_per_token(config: GPTConfig, s: int | None = None) -> float:
    """Model FLOPs to train on one token of a sequence of s tokens, by default the longest: matrix
    multiplications, forward once and backward twice.

    Attention counts over all s² scores, as in the papers: also those that the causal mask or a
    sliding window hides. For a GPT it is

        72 L h² (1 + s/6h + V/12hL)        arXiv 2205.05198, eq. 7, over B s

    Of experts, those that a token goes through count, and the router.
    """
    h = config.hidden_size
    mlps, experts = num_mlps(config, "router_topk")
    weights = block_matrices(config, mlps) + experts * h * getattr(config, "num_experts", 0)
    s = s or config.seq_length
    scores = 12 * config.num_layers * s * config.num_heads * config.head_dim
    return 6 * (weights + h * config.vocab_size) + scores
