"""A training YAML of NeMo or Megatron-LM is the command line that it stands for: each key of the
tables, each refusal, files as they stand, and runs bit for bit."""

import dataclasses
import shlex
from pathlib import Path

import processes
import pytest
import small_run
import yaml
from parity import again

from finetune.nemo_config import PromptConfig
from run import yaml_config
from run.config import ConfigError
from run.flags import parse, parse_all
from run.pretraining import Config
from run.yaml_config import ONLY, ROWS, TABLE

FILES = Path(__file__).parent / "training_yaml"
# What a file of a cluster leaves open, and the flags that say it.
HERE = "--data texts/ --val-data held_out/ --out runs/y --tokenizer bytes"
# file -> (flags beside HERE, ranks, what the file says as flags)
GPT2 = "--model gpt2 --vocab-size 257 --seed 1234"
STAND = {
    "nemo_gpt.yaml": (
        "",
        1,
        f"{GPT2} --num-layers 12 --hidden-size 768 --num-heads 12 --ffn-hidden-size 3072"
        " --seq-length 512 --dropout 0.1 --make-vocab-size-divisible-by 128 --precision fp16"
        " --micro-batch-size 4 --global-batch-size 8 --steps 100000 --lr 2e-4 --min-lr 2e-5"
        " --warmup-steps 500 --decay-steps 50000 --weight-decay 0.01 --adam-beta2 0.98 --keep 10"
        " --grad-clip 1 --log-every 10 --eval-every 100 --save-every 100 --resume --norm-eps 1e-5"
        " --init-std 0.02",
    ),
    "launcher_126m_tp2_pp4.yaml": (
        "",
        64,
        f"{GPT2} --num-layers 12 --hidden-size 768 --num-heads 12 --ffn-hidden-size 3072"
        " --seq-length 2048 --dropout 0.1 --make-vocab-size-divisible-by 128 --precision bf16"
        " --tp 2 --pp 4 --cp 2 --virtual-stages 3 --sequence-parallel --zero-stage 1"
        " --micro-batch-size 4 --global-batch-size 256 --steps 600000 --lr 6e-4 --min-lr 6e-5"
        " --warmup-steps 636 --decay-steps 500000 --weight-decay 0.1 --keep 2 --init-std 0.023"
        " --log-every 10 --eval-every 1000 --save-every 1000 --resume --norm-eps 1e-5",
    ),
    "launcher_llama2_13b.yaml": (
        "",
        256,
        f"{GPT2} --num-layers 40 --hidden-size 5120 --num-heads 40 --ffn-hidden-size 13824"
        " --seq-length 4096 --dropout 0 --norm rmsnorm --activation swiglu --positions rotary"
        " --attention-bias none --no-mlp-bias --no-tied --init-std 0.01 --norm-eps 1e-5"
        " --rotary-share 1 --make-vocab-size-divisible-by 128 --precision bf16 --tp 2"
        " --sequence-parallel --zero-stage 1 --micro-batch-size 1 --global-batch-size 2048"
        " --steps 300000 --lr 1e-4 --min-lr 1e-5 --warmup-steps 107 --decay-steps 288127"
        " --weight-decay 0.1 --keep 10 --log-every 10 --eval-every 2000 --save-every 2000",
    ),
    "megatron_345m_pp4_vp1.yaml": (
        "--resume",
        8,
        f"{GPT2} --num-layers 12 --hidden-size 512 --num-heads 8 --seq-length 1024 --pp 4"
        " --virtual-stages 3 --micro-batch-size 4 --global-batch-size 32 --steps 50 --lr 1.5e-4"
        " --min-lr 1e-5 --weight-decay 0.01 --warmup-steps 3200 --decay-steps 320000"
        " --adam-beta2 0.999 --log-every 1 --save-every 10000 --eval-every 1000 --precision fp16"
        " --grad-clip 1 --resume --dropout 0.1",
    ),
}


def read(text, ranks: int = 1, folder=None, **given) -> dict:
    """The flags of a YAML, a text or what it holds."""
    path = folder / "x.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return yaml_config.read(str(path), given, 0, ranks)


@pytest.fixture
def flags(tmp_path):
    return lambda text, ranks=1, **given: read(text, ranks, tmp_path, **given)


@pytest.fixture
def refusal(flags):
    def words(text, **given) -> str:
        with pytest.raises(ConfigError) as e:
            flags(text, **given)
        assert "\n" not in str(e.value)
        return str(e.value).partition(": ")[2]

    return words


def of_flags(words: str) -> Config:
    return parse(shlex.split(words), 0)


def of_file(name: str, words: str, ranks: int) -> Config:
    return parse_all(["--config", str(FILES / name), *words.split()], 0, Config, ranks)[0]


# --- files as they stand --------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND)
def test_a_file_is_its_command_line(name, capsys):
    beside, ranks, words = STAND[name]
    found = of_file(name, f"{HERE} {beside}", ranks)
    assert found == of_flags(f"{HERE} {words}")
    # the printed line can be copied; every key of the file is somewhere in the report
    report = capsys.readouterr().out
    (line,) = (line for line in report.splitlines() if " train.py " in line)
    launch = f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python"
    assert f".yaml: {launch} train.py" in line
    assert of_flags(line.partition("train.py ")[2]) == found
    assert ("ranks; here" in report) == (name != "megatron_345m_pp4_vp1.yaml")
    keys = yaml_config.Keys(yaml_config.read_file(FILES / name), {}, 1).paths
    assert {key for key in keys if key not in report} == set()


@pytest.mark.parametrize("key", ["optim.lr", "virtual_pipeline_model_parallel_size", "optim.name"])
def test_a_wrong_row_is_found(key, monkeypatch):
    beside, ranks, words = STAND["launcher_126m_tp2_pp4.yaml"]
    names, _ = TABLE[key]
    monkeypatch.setitem(TABLE, key, (names, lambda value, keys: 2))
    found = of_file("launcher_126m_tp2_pp4.yaml", f"{HERE} {beside}", ranks)
    assert found != of_flags(f"{HERE} {words}")


def test_a_run_is_refused_in_one_line(capsys):
    file = f"{FILES}/megatron_gpt_config.yaml"
    assert "lr_decay_samples: 255126953 is" in small_run.refusal(capsys, "--config", file)


def test_nemos_prompts_as_they_stand(capsys):
    """Without a prompt file existing tasks are nowhere yet. A model is asked for by its flag."""
    file = f"{FILES}/nemo_prompt_learning.yaml"
    found = []
    prompts = PromptConfig.read(file, found.append)
    assert (prompts.new_tasks, prompts.existing_tasks) == (["rte"], [])
    assert prompts.prompt_tasks.tokens == {"rte": 9} and prompts.p_tuning.num_layers == 2
    assert "existing_tasks ['boolq', 'intent_and_slot'], for restore_path is null" in found[-1]
    error = small_run.refusal(capsys, "finetune.prompt_tuning", "--config", file)
    assert "--load models/megatron_125M_gpt.nemo: no such folder" in error
    assert "-m finetune.prompt_tuning reads it" in small_run.refusal(capsys, "--config", file)


def test_what_a_file_leaves_open_is_asked_for():
    with pytest.raises(ConfigError) as e:
        of_file("launcher_126m_tp2_pp4.yaml", "--tokenizer bytes", 64)
    message = str(e.value)
    for words in (
        "data.data_prefix: ${data_dir} has no value here; write one, or give --data;",
        "data.splits_string: 99990,8,2, but the last twentieth is held out; write 95,5,0, or give",
        "exp_manager.explicit_log_dir: ${base_results_dir} has no value here",
    ):
        assert words in message, message
    with pytest.raises(ConfigError, match=r"data\.data_prefix: \?\?\? is to be filled in, or give"):
        of_file("nemo_gpt.yaml", "--tokenizer bytes", 1)


def test_megatrons_own_example_counts_samples(tmp_path):
    """All else of it is done here."""
    path = "megatron_gpt_config.yaml"
    with pytest.raises(ConfigError) as e:
        of_file(path, HERE, 8)
    message = str(e.value).partition(": ")[2]
    names = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
    assert {part.partition(":")[0] for part in message.split("; ")[::2]} == {*names}
    content = yaml_config.read_file(FILES / path) | dict.fromkeys(names) | {"train_iters": 9}
    found = read(content, 8, tmp_path, tokenizer="bytes", val_data=["x"])
    assert found | dict(activation="swiglu", norm="layernorm1p", rotary_share=0.5) == found
    assert found | dict(steps=9, decay_steps=9, warmup_steps=0, timeout=600.0) == found
    assert found["rampup_batch_size"] == [32, 32, 65324160]
    # int(8 / 3 h / 64) 64
    assert found | dict(ffn_hidden_size=2688, tied=False, precision="bf16") == found
    assert "sequence_parallel" not in found and "resume" not in found


def test_the_ranks_of_a_file_are_said(capsys):
    of_file("launcher_llama2_13b.yaml", HERE, 8)
    assert "llama2_13b.yaml: for 32 x 8 ranks; here are 8" in capsys.readouterr().out
    parse_all(["--config", str(FILES / "nemo_gpt.yaml"), *HERE.split()], 1, Config, 8)
    assert not capsys.readouterr().out


# --- each key -------------------------------------------------------------------------------------

# (keys beside, value, flags) of keys whose values change
ROPE = {"position_embedding_type": "rope"}
WITH = {
    "num_layers_per_virtual_pipeline_stage": (
        dict(num_layers=24, pipeline_model_parallel_size=4), 2, dict(virtual_stages=3)
    ),
    "sequence_parallel": (dict(tensor_model_parallel_size=2), True, dict(sequence_parallel=True)),
    "num_query_groups": (dict(group_query_attention=True), 2, dict(num_kv_heads=2)),
    "optim.name": ({}, "distributed_fused_adam", dict(zero_stage=1)),
    "use_distributed_optimizer": ({}, True, dict(zero_stage=1)),
    "fsdp": ({}, True, dict(zero_stage=3)),
    "optim.grad_sync_dtype": ({}, "bf16", dict(reduce_dtype="bf16")),
    "normalization": (dict(apply_layernorm_1p=True), "RMSNorm", dict(norm="rmsnorm1p")),
    "apply_layernorm_1p": ({}, True, dict(norm="layernorm1p")),
    "layernorm_zero_centered_gamma": ({}, True, dict(norm="layernorm1p")),
    "activation": ({}, "squared-relu", dict(activation="squared-relu")),
    "activation_func": ({}, "fast-geglu", dict(activation="geglu")),
    "squared_relu": ({}, True, dict(activation="squared-relu")),
    "swiglu": (dict(hidden_size=96), True, dict(activation="swiglu", ffn_hidden_size=256)),
    "bias": ({}, False, dict(attention_bias="none", mlp_bias=False)),
    "add_bias_linear": ({}, True, dict(attention_bias="all", mlp_bias=True)),
    "disable_bias_linear": ({}, True, dict(attention_bias="none", mlp_bias=False)),
    "add_qkv_bias": (dict(add_bias_linear=False), True, dict(attention_bias="qkv")),
    "qkv_bias": (dict(bias=False), True, dict(attention_bias="qkv")),
    "position_embedding_type": ({}, "learned_absolute", dict(positions="learned")),
    "use_rotary_position_embeddings": ({}, True, dict(positions="rotary")),
    "rotary_percentage": (ROPE, 0.5, dict(rotary_share=0.5)),
    "rotary_percent": (ROPE, 0.5, dict(rotary_share=0.5)),
    "rotary_base": (ROPE, 500000, dict(rotary_base=500000)),
    "window_size": ({}, [7, 0], dict(sliding_window=8)),
    "max_position_embeddings": ({}, 64, dict(seq_length=64)),
    "untie_embeddings_and_output_weights": ({}, True, dict(tied=False)),
    "tokenizer.library": ({}, "megatron", {}),
    "tokenizer.type": ({}, "GPT2BPETokenizer", dict(tokenizer="gpt2")),
    "tokenizer_type": ({}, "GPT2BPETokenizer", dict(tokenizer="gpt2")),
    "trainer.precision": ({}, "bf16-mixed", dict(precision="bf16")),
    "bf16": ({}, True, dict(precision="bf16")),
    "fp16": ({}, False, dict(precision="fp32")),
    "fp8": (
        dict(fp8_hybrid=True, fp8_amax_compute_algo="max", fp8_amax_history_len=9),
        "hybrid",
        dict(fp8="delayed", fp8_skip=0, fp8_scales="any", fp8_history=9),
    ),
    "activations_checkpoint_granularity": ({}, "selective", dict(recompute="selective")),
    "recompute_granularity": ({}, "full", dict(recompute="full")),
    "recompute_activations": ({}, True, dict(recompute="selective")),
    "window_attn_skip_freq": ({}, 3, dict(window_pattern="110")),
    "optim.sched.name": ({}, "PolynomialDecayAnnealing", dict(lr_schedule="linear")),
    "lr_decay_style": ({}, "WSD", dict(lr_schedule="wsd")),
    "lr_wsd_decay_iters": (dict(lr_decay_style="WSD"), 3, dict(wsd_steps=3)),
    "lr_warmup_iters": ({}, 7, dict(warmup_steps=7)),
    "lr_warmup_fraction": (dict(train_iters=50), 0.1, dict(warmup_steps=5)),
    "trainer.max_steps": ({"optim.sched.constant_steps": 2}, 9, dict(steps=9, decay_steps=7)),
    "train_iters": (dict(lr_decay_iters=20), 9, dict(steps=9, decay_steps=20)),
    "optim.sched.constant_steps": ({"trainer.max_steps": 9}, 4, dict(decay_steps=5)),
    "lr_decay_iters": (dict(train_iters=3), 8, dict(decay_steps=8)),
    "optim.betas": ({}, [0.8, 0.9], dict(adam_beta1=0.8, adam_beta2=0.9)),
    "data.data_prefix": ({}, [0.3, "A", 0.7, "B"], dict(data=["0.3:A", "0.7:B"])),
    "data.data_prefix.train": ({}, ["A", "B"], dict(data=["A", "B"])),
    "data.data_prefix.validation": ({}, ["C"], dict(val_data=["C"])),
    "data_path": ({}, "1 A 2 B", dict(data=["1:A", "2:B"])),
    "train_data_path": ({}, "A", dict(data=["A"])),
    "valid_data_path": ({}, "A", dict(val_data=["A"])),
    "data.splits_string": ({}, "950,49,1", {}),
    "split": (dict(valid_data_path="A"), "98,2,0", dict(val_data=["A"])),
    "trainer.val_check_interval": ({}, 30, dict(eval_every=30, save_every=30)),
    "exp_manager.checkpoint_callback_params.save_top_k": ({}, -1, dict(keep=0)),
    "exp_manager.exp_dir": ({"exp_manager.name": "n"}, "runs", dict(out="runs/n")),
    "exp_manager.resume_if_exists": ({}, True, dict(resume=True)),
    "load": (dict(save="ckpt"), "ckpt", dict(resume=True, out="ckpt")),
    "distributed_timeout_minutes": ({}, 10, dict(timeout=600.0)),
}  # fmt: skip
# What files with a learning rate must say.
COSINE = {"lr_decay_style": "cosine", "optim.sched.name": "CosineAnnealing"}
COSINE |= {"weight_decay": 0.01, "optim.weight_decay": 0.01}
# Values of fields by type, for keys whose values are the flags'.
VALUES = {list[int]: [2, 2, 9], int: 3, float: 0.25, bool: True, str: "words"}


@pytest.mark.parametrize("key", [key for key in TABLE if key != "restore_from_path"])
def test_each_key_becomes_its_flags(key, flags):
    names, function = TABLE[key]
    if function:
        beside, value, expected = WITH[key]
    else:
        (name,) = names
        of = next(field.type for field in dataclasses.fields(Config) if field.name == name)
        of = of if isinstance(of, type) else of.__args__[0]
        beside, expected = dict(COSINE), {name: VALUES[of]}
        if "weight_decay" in names:
            beside = {}
        value = VALUES[of]
    found = flags({**beside, key: value}, ranks=8, model="gpt2")
    assert {name: found.get(name) for name in expected} == expected
    assert {name for name in names if name in found} <= found.keys()
    if key in ONLY:
        # The flag does not say all that the key does: --zero-stage does not make sgd AdamW.
        with pytest.raises(ConfigError, match=r"sgd is not done here; write adamw$"):
            flags({key: "sgd"}, **dict.fromkeys(names, 0))
        return
    # a flag on the command line wins, and then the key is not even read
    won = flags(COSINE | {key: "${nowhere}"}, model="gpt2", **dict.fromkeys(names, 0))
    assert not set(names) & won.keys()
    with pytest.raises(
        ConfigError, match=r"\$\{nowhere\} has no value here; write one, or give --"
    ):
        flags({key: "${nowhere}"})


def test_each_key_stands_in_one_table():
    keys = [key for _, words, *_ in ROWS for key in words.split()]
    assert len(keys) == len(set(keys)) and set(keys) & ONLY.keys() == {"optim.name"}
    assert {key for key in TABLE if TABLE[key][1]} == {*WITH, "restore_from_path"}
    fields = {field.name for field in dataclasses.fields(Config)}
    assert {name for names, _ in TABLE.values() for name in names} <= fields


@pytest.mark.parametrize("key", ONLY)
def test_what_is_not_done_is_refused_by_name(key, flags, refusal):
    allowed = ONLY[key][0]
    flags({key: None})
    if allowed != "null":
        flags({key: yaml.safe_load(allowed) if "1e" not in allowed else float(allowed)})
    assert refusal({key: "other"}) == f"{key}: other is not done here; write {allowed}"


@pytest.mark.parametrize(
    "content, words",
    [
        ({"model": {"hidden_sise": 3}}, "hidden_sise: not known here; did you mean hidden_size?"),
        ({"trainer": {"maxx": 3, "b": 1}}, "trainer.b: not known here; leave out; trainer.maxx: n"),
        # patterns of IGNORED fit these
        ({"recompute_granularty": "full"}, "did you mean recompute_granularity?"),
        ({"exp_manager": {"exp_dri": "a"}}, "did you mean exp_manager.exp_dir?"),
        ({"modle": {"seed": 3, "optim": {"b": 1}}}, "modle: not known here; did you mean model?"),
        ({"model": "gpt2"}, "model: not known here; leave out"),
        ("seed: 1\nmodel:\n  lr: 1\n  seed: 2\n  lr: 3\n", "lr stands there twice from line 3 on"),
        ({"trainer": {"limit_train_batches": 2}}, "2 is not done here; write 1.0"),
        ({"data": {"data_prefix": ["a_document"]}}, "data.data_prefix: tokenized .bin is not read"),
        ({"hidden_size": "abc"}, "hidden_size: 'abc': Expected `int | null`, got `str`, or give"),
        ({"num_layers_per_virtual_pipeline_stage": 0, "num_layers": 2}, "0 does not fit"),
        ({"fp8": "e4m3"}, "fp8: e4m3 is not done here; write hybrid"),
        ({"fp8": True, "fp8_hybrid": False}, "fp8: True is not done here; write hybrid"),
        ({"optim": {"betas": [0.9]}}, "optim.betas: [0.9] does not fit"),
        ({"optim": {"betas": [0.9, 0.9, 0.9]}}, "optim.betas: [0.9, 0.9, 0.9] does not fit"),
        ({"optim": {"lr": 1}}, "optim.sched.name: constant is none of cosine, cosineannealing"),
        ({"optim": {"lr": 1}}, "optim.weight_decay: ??? is to be filled in, or give --weight-d"),
        ({"lr": 1, "hidden_dropout": 0.0}, "attention_dropout: 0.1, but another key says 0.0"),
        ({"lr": 1, "reset_attention_mask": True}, "True, but another key says False"),
        ({"data_path": "0.5 A 0.5"}, "data_path: 0.5 A 0.5 does not fit, or give --data"),
        ({"data": {"data_prefix": {}}}, "data.data_prefix: {} does not fit"),
        ({"train_iters": 5, "optim.sched.constant_steps": 9}, "no step is left to the decay"),
        ("model: &x {seed: 3, name: *x}", "maximum recursion depth"),
        ({"seed": "${multiply:abc,100000000000}"}, "abc,100000000000} has no value here"),
        ({"seed": "${multiply:[,2}"}, "[,2} has no value here"),
        ({"window_size": 3}, "window_size: 3 does not fit, or give --sliding-window"),
        ({"optim": {"name": "sgd"}}, "optim.name: sgd is not done here; write adamw"),
        ({"normalization": "batchnorm"}, "batchnorm is none of layernorm, rmsnorm, layernorm1p"),
        ({"activation": "reglu"}, "activation: reglu is none of swiglu, fast_swiglu, geglu"),
        ({"tokenizer": {"type": "x"}}, "tokenizer.type: x is none of megatron, gpt2bpe"),
        ({"trainer": {"precision": 8}}, "8 is none of 16, 16_mixed, bf16"),
        (
            {"hidden_dropout": 0.1, "attention_dropout": 0.0},
            "attention_dropout: 0.0, but another key says 0.1, or give --dropout",
        ),
        ({"lr_wsd_decay_style": "linear"}, "linear is not done here; write exponential"),
        ({"split": "9,1"}, "split: 9,1, but the last twentieth is held out; write 95,5,0, or give"),
        ({"split": "a"}, "split: a does not fit"),
        ({"load": "a", "save": "b"}, "load: a is not save; write null, or give --resume"),
        ({"restore_from_path": "a.nemo"}, "a.nemo is to be imported first, or give --load"),
        ({"model": {"task_templates": []}}, "is for prompts: -m finetune.prompt_tuning reads it"),
        ({"seed": "${oc.env:HOME}"}, "seed: ${oc.env:HOME} has no value here"),
        ({"seed": "${seed}"}, "seed: ${seed} has no value here; write one, or give --seed"),
        ({"lr": 1, "model": {"lr": 2}}, "lr stands there twice"),
        ({"seed": "${add:3, a}"}, "seed: ${add:3, a} has no value"),
    ],
)  # fmt: skip
def test_refusals(content, words, refusal):
    assert words in refusal(content)


def test_keys_of_other_files_are_known(flags, refusal):
    """Of the launcher's gpt3/5b.yaml, gpt3/175b.yaml, llama/llama2_70b.yaml; NeMo's Llama."""
    names = """
    gc_interval reduce_amax cross_entropy_loss_fusion get_attention_mask_from_fusion use_emha sharp
    apply_rope_fusion deterministic_mode batch_p2p_comm tp_comm_atomic_ag
    optim.contiguous_param_buffer data.validation_drop_last data.shuffle_documents
    trainer.enable_model_summary
    """
    assert flags(dict.fromkeys(names.split(), True)) == {}
    assert flags({"fsdp_grad_reduce_dtype": "fp32", "nobody_knows": None}) == {}
    assert refusal({"nobody_knows": "${this}"}) == "nobody_knows: not known here; leave out"


def test_all_refusals_are_in_one_line(refusal):
    message = refusal({"a": 1, "mock_data": True, "seed": "${b}"})
    assert message.count(";") == 5 and all(key in message for key in ("a:", "mock_data", "seed"))


def test_interpolations(flags):
    text = """
name: n
trainer:
  max_steps: ${multiply:${model.data.seq_length}, 2}
  log_every_n_steps: ${training.model.seed}
exp_manager: {explicit_log_dir: "runs/${name}-${model.seed}"}
model:
  seed: 7
  hidden_size: ${multiply:8, ${.num_attention_heads}}
  num_attention_heads: ${divide_floor:${add:5, 4}, 2}
  data: {seq_length: "${..hidden_size}"}
  optim: {lr: 1e-4, weight_decay: .5e-1, sched: {name: CosineAnnealing}}
"""
    assert flags(text, seq_length=2)["steps"] == 4
    assert flags(text, num_heads=3)["hidden_size"] == 24
    found = flags(text)
    assert (found["hidden_size"], found["num_heads"], found["seq_length"]) == (32, 4, 32)
    assert (found["steps"], found["log_every"], found["out"]) == (64, 7, "runs/n-7")
    assert (found["lr"], found["weight_decay"]) == (1e-4, 0.05)


def test_absent_keys_have_the_defaults_of_the_files(flags):
    common = dict(lr=3.0, min_lr=0.0, warmup_steps=0, adam_beta1=0.9, adam_beta2=0.999, dropout=0.1)
    common |= dict(document_mask=False, lr_schedule="cosine")
    megatron = dict(seed=1234, weight_decay=0.01, grad_clip=1.0, precision="fp32")
    nemo = dict(weight_decay=0.01, grad_clip=0.0)
    clip = {"trainer.gradient_clip_val": None}
    assert flags(COSINE | {"lr": 3.0, "min_lr": None}) == common | megatron
    assert flags({"lr": 3.0, "lr_decay_style": "cosine"}) == common | megatron
    assert flags(COSINE | clip | {"optim.lr": 3.0}) == common | nemo
    assert flags({"lr": 3.0}) == common | megatron | dict(lr_schedule="linear")


def test_flags_win_over_what_is_computed(flags):
    stages = dict(num_layers=16, num_layers_per_virtual_pipeline_stage=1)
    assert flags(stages, model="gpt2", pp=4)["virtual_stages"] == 4
    assert flags(stages, model="gpt2", pp=4, num_layers=8)["virtual_stages"] == 2
    assert flags({"train_iters": 100}, steps=9) == dict(decay_steps=9)
    assert flags({"train_iters": 100, "lr_decay_iters": 50}, steps=9) == dict(decay_steps=50)


def test_values_that_megatron_does_not_read(flags):
    assert flags(dict(num_query_groups=1, group_query_attention=False)) == {}
    assert flags(dict(fp8="hybrid", fp8_amax_history_len=1024))["fp8_history"] == 1


def test_one_rank_shares_with_nobody(flags):
    """train.py refuses flags that would do nothing."""
    content = dict(use_distributed_optimizer=True, sequence_parallel=True, rotary_percent=0.5)
    assert flags(content) == {}
    assert flags(content | dict(tensor_model_parallel_size=2), 2) == dict(
        tp=2, sequence_parallel=True
    )
    assert flags(content, 2) == dict(zero_stage=1)


# --- runs -----------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat, and the hat sat on the cat. " * 400
SHRUNK = (
    "--hidden-size 48 --ffn-hidden-size 64 --seq-length 32 --steps 5 --precision fp32 --device cpu"
    " --tokenizer bytes --decay-steps 5 --warmup-steps 1 --eval-every 0 --save-every 0"
    " --make-vocab-size-divisible-by 1"
)
# file -> (ranks, flags beside SHRUNK). The layouts are those of the files, but for --cp 1 of 126m.
RUNS = {
    "nemo_gpt.yaml": (1, "--num-layers 1"),
    "megatron_345m_pp4_vp1.yaml": (4, "--no-resume --global-batch-size 16"),
    "launcher_126m_tp2_pp4.yaml": (8, "--cp 1 --global-batch-size 16"),
    "launcher_llama2_13b.yaml": (4, "--num-layers 2 --num-heads 4 --global-batch-size 4"),
}


def run(words: list[str], world: int, capsys) -> str:
    """What a run prints."""
    if world == 1:
        assert small_run.run(*words) == 0
        return capsys.readouterr().out
    done = processes.run(["train.py", *words], world=world)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [name if RUNS[name][0] == 1 else again(name) for name in RUNS])
def test_a_file_trains_as_its_flags(name, tmp_path, capsys):
    """Five steps by the file, and five by the command line that it has printed, bit for bit."""
    world, flags = RUNS[name]
    (tmp_path / "a.txt").write_text(TEXT)
    words = f"{SHRUNK} {flags} --data {tmp_path}/a.txt --val-data {tmp_path}/a.txt".split()
    words += ["--cache", f"{tmp_path}/cache"]
    by_file = ["--config", f"{FILES}/{name}", *words, "--out", f"{tmp_path}/file"]
    report = run(by_file, world, capsys)
    (line,) = (line for line in report.splitlines() if " train.py " in line)
    run([*shlex.split(line.partition("train.py ")[2]), "--out", f"{tmp_path}/flags"], world, capsys)
    by_file, by_flags = (small_run.numbers_of(tmp_path / out) for out in ("file", "flags"))
    assert by_file == by_flags and len(by_file) == 5
