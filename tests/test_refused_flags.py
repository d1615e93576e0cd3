"""Configurations that cannot run: one line names the flag, its value and what would fit, before any
process group is made. test_config.py has files of flags, test_train.py the command."""

import math

import pytest

from course.training_commands import config_of
from run.config import ConfigError, RunConfig
from run.rules import validate

LORA = dict(load="runs/base", data=["x"], peft="lora")
ADAPTER = LORA | dict(peft="adapter")
DPO = dict(command="preference.py", method="dpo", data=["p.jsonl"], device="cpu")
REWARD = DPO | dict(method="reward")
GRPO = dict(command="reinforcement.py", method="grpo", data=["p.jsonl"], reward="r.py:f")
GRPO |= dict(device="cpu", seq_length=64, answer_tokens=16)
PPO = GRPO | dict(method="ppo")
HYBRID = dict(data_parallel_replicate_degree=4)

# ranks -> (flags, words of the message)
REFUSED = {
    1: [
        (dict(min_lr=1.0), "--min-lr 1.0: must be at most --lr"),
        (dict(num_kv_heads=0), "--num-kv-heads 0: must be at least 1"),
        (dict(global_batch_size=2**31 - 1), "--global-batch-size 2147483647: must be at most"),
        (dict(log_every=0), "--log-every 0"),
        (dict(out="a\0b"), "--out 'a\\x00b': has bytes that are not UTF-8"),
        (dict(head_dim=31), "--head-dim 31: must be even for rotary positions; [32] would fit"),
        (dict(model="qwen3-0.6b", norm="layernorm"), "--norm layernorm: heads have norms"),
        (
            dict(norm="batchnorm"),
            "--norm batchnorm: must be one of layernorm, layernorm1p, rmsnorm",
        ),
        (dict(sliding_window=-1), "--sliding-window -1: must be at least 1, or 0 for none"),
        # flags that would change nothing
        (
            dict(num_experts=4, router="topk", router_temperature=0.5),
            "--router-temperature 0.5: is",
        ),
        (LORA | dict(peft="ia3", lora_rank=2), "--lora-rank 2: is only for --peft lora"),
        (LORA | dict(adapter_size=8), "--adapter-size 8: is only for --peft adapter"),
        (dict(command="sft.py", lora_rank=2), "--lora-rank 2: needs --peft, which says what"),
        (REWARD | dict(load="x", head_chunk=8), "--head-chunk 8: a reward"),
        (dict(recompute="full", recompute_layers=0), "--recompute-layers 0: recomputes nothing"),
        (dict(reduce_dtype="bf16"), "--reduce-dtype bf16: is about ranks that share the batch"),
        (dict(zero_stage=2), "--zero-stage 2: is about ranks that share the batch"),
        (HYBRID | dict(zero_stage=2), "alone; start several with torchrun --nproc-per-node 8"),
        (dict(model="gpt2", load="x"), "--model gpt2: --load fixes the shape already; give one"),
        (dict(load="x"), "--load x: learns from what? --data PATH names text"),
        (dict(command="adapters.py", load="x"), "--load x: learns from what?"),
        # preferences
        (DPO | dict(data=[]), "--data: preference.py needs --data FILE, pairs"),
        (DPO, "--load: preference.py needs --load CKPT"),
        (DPO | dict(dropout=0.1), "--dropout 0.1: "),
        (DPO | dict(peft="lora", lora_dropout=0.5), "--lora-dropout 0.5: must be 0"),
        (DPO | dict(beta=0.0), "--beta 0.0: must be above 0"),
        (REWARD | dict(beta=0.1), "--beta 0.1: is only for --method dpo"),
        (REWARD | dict(peft="lora"), "--peft lora: leaves the head"),
        (DPO | dict(fp8="current"), "--fp8 current: "),
        (DPO | dict(micro_batch_size=3, global_batch_size=12), "4, 6, 12 would fit"),
        # reinforcement learning
        (GRPO, "--load: reinforcement.py needs --load CKPT"),
        (GRPO | dict(fp8="current"), "--fp8 current: scales depend"),
        (GRPO | dict(dropout=0.1), "--dropout 0.1: must be 0"),
        (GRPO | dict(peft="lora", lora_dropout=0.1), "--lora-dropout 0.1: must be 0"),
        (GRPO | dict(gae_lambda=0.5), "--gae-lambda 0.5: is only for --method ppo"),
        (GRPO | dict(critic_lr=0.5), "--critic-lr 0.5: is only for --method ppo"),
        (PPO | dict(critic_lr=-1.0), "--critic-lr -1.0: must be at least"),
        (PPO | dict(lr=1e-3, min_lr=1e-4, critic_lr=1e-5), "must be at least --min-lr 0.0001"),
        (GRPO | dict(group_size=1), "--group-size 1: must be at least 2"),
        (PPO | dict(group_size=0), "--group-size 0: must be at least 1"),
        (GRPO | dict(global_batch_size=12), "divisible by --group-size 8; 8 or 16 would fit"),
        (GRPO | dict(answer_tokens=64), "--answer-tokens 64: must be from 1 to below"),
        (GRPO | dict(epochs=0), "--epochs 0: must be from 1 to 1000"),
        (GRPO | dict(clip_range=1.5), "--clip-range 1.5: must be from 0 to 1"),
        (PPO | dict(gae_lambda=2.0), "--gae-lambda 2.0: must be from 0 to 1"),
        (GRPO | dict(beta=-1.0), "--beta -1.0: must be from 0"),
    ],
    2: [
        (DPO | dict(global_batch_size=6), "--global-batch-size 6: leaves 3 rows"),
        (GRPO | dict(rollout_tp=3), "--rollout-tp 3: must divide the 2 ranks; [1, 2]"),
        (GRPO | dict(rollout_pp=3), "--rollout-pp 3: must divide the 2 ranks"),
        (GRPO | dict(rollout_tp=2, num_heads=3, hidden_size=48), "--rollout-tp 2: must div"),
        (GRPO | dict(rollout_pp=2, num_layers=3), "--rollout-pp 2: must divide the 3 lay"),
        (GRPO | dict(ep=2, num_experts=4, rollout_tp=2), "--ep 2: experts that are spread"),
    ],
    # adapters
    4: [
        (
            LORA | dict(peft_targets=["query", "head"]),
            "--peft-targets ['query', 'head']: head is no target of --peft lora in this model;"
            " there are query, key, value, output, gate, up, down",
        ),
        (LORA | dict(lora_rank=0), "--lora-rank 0: must be at least 1"),
        (LORA | dict(lora_alpha=math.nan), "--lora-alpha nan: must be above 0"),
        (LORA | dict(lora_dropout=1.0), "--lora-dropout 1.0: must be at least 0 and below 1"),
        (LORA | dict(lora_dropout=0.1, num_experts=4), "--lora-dropout 0.1: experts have no"),
        (ADAPTER | dict(adapter_size=6, tp=4), "divisible by --tp 4; 4 or 8 would fit"),
        (ADAPTER | dict(adapter_size=0), "--adapter-size 0: must be at least 1"),
        (dict(peft="lora"), "--peft lora: for which model? --load CKPT names it"),
        (LORA | dict(plan="h100", lora_dropout=0.1), "--plan h100: predicts steps that train a"),
    ],
    # layouts
    8: [
        (dict(tp=3), "--tp 3: must divide the 8 ranks; [1, 2, 4] would fit"),
        (dict(tp=8, num_heads=4), "--tp 8: must divide --num-heads 4; [1, 2, 4] would fit"),
        (
            dict(tp=4, num_heads=12, num_kv_heads=6, hidden_size=96),
            "--tp 4: must divide --num-kv-heads 6",
        ),
        (dict(tp=8, ffn_hidden_size=684), "--tp 8: must divide --ffn-hidden-size 684"),
        (
            dict(tp=8, sequence_parallel=True, seq_length=100),
            "--seq-length 100: must be divisible by --tp 8 under sequence parallelism; 96 or 104",
        ),
        (dict(pp=3), "--pp 3: must divide the 8 ranks over --tp 1; [1, 2, 4] would fit"),
        (dict(pp=8), "--num-layers 4: must be divisible by --pp 8 times --virtual-stages 1"),
        (
            dict(pp=2, layer_split=[1, 2]),
            "--layer-split [1, 2]: must be 2 numbers (--pp 2 times --virtual-stages 1), none"
            " below 0, that add up to --num-layers 4; these are 2 that add up to 3",
        ),
        (dict(layer_split=[4]), "--layer-split 4: needs --pp 2 or more"),
        (
            HYBRID,
            "--data-parallel-replicate-degree 4: replicates what --zero-stage 1, 2 or 3 shards",
        ),
        (
            HYBRID | dict(zero_stage=1, tp=2),
            "--data-parallel-replicate-degree 4: must divide the 4 data-parallel ranks into groups"
            " of 2 or more; [1, 2] would fit",
        ),
        (
            HYBRID | dict(zero_stage=3, num_experts=4, ep=4),
            "groups of 2 or more that --ep 4 divides; [1, 2] would fit",
        ),
        (dict(virtual_stages=3), "--virtual-stages 3: only --schedule interleaved or zb-v"),
        (dict(schedule="gpipe"), "--schedule gpipe: needs --pp 2 or more"),
        (
            dict(pp=2, schedule="zb-v"),
            "--virtual-stages 1: --schedule zb-v has 2 on each pipeline rank",
        ),
        (
            dict(pp=2, schedule="dualpipe-v", virtual_stages=2, global_batch_size=12),
            "--global-batch-size 12: makes 3 micro-batches for each pipeline, and dualpipe-v needs "
            "twice --pp 2 or more; 16 would fit",
        ),
        (
            dict(pp=4, schedule="interleaved", global_batch_size=12),
            "--global-batch-size 12: makes 6 micro-batches for each pipeline, and interleaved"
            " needs a multiple of --pp 4; 8 or 16 would fit",
        ),
        (dict(tp=4, global_batch_size=3), "divisible by the 2 data-parallel ranks; 2 or 4 would"),
    ],
}


@pytest.mark.parametrize(
    "world, flags, words", [(world, *case) for world, cases in REFUSED.items() for case in cases]
)
def test_refused(world, flags, words, monkeypatch):
    # the shape is that of a preset: there is no checkpoint
    shape = config_of(flags | dict(load=None))
    monkeypatch.setattr(RunConfig, "model_config", shape.model_config)
    base_needed = "needs --" in words or "--load" in words
    with pytest.raises(ConfigError) as refused:
        validate(config_of(flags), world, base_needed)
    assert words in str(refused.value) and "\n" not in str(refused.value)
