"""A training YAML of NeMo or Megatron-LM, read as flags: `--config x.yaml`. Further flags win.

    NeMo 1 and its launcher    trainer: {max_steps: ..}, exp_manager: {..}, model: {optim: {lr: ..}}
    Megatron-LM                --yaml-cfg: num_layers, lr, ..; or under MODEL_ARGS: --num-layers, ..

    model: {hidden_size: 768, ffn_hidden_size: "${multiply:4, ${.hidden_size}}", optim: {lr: 6e-4}}
    ->  --hidden-size 768 --ffn-hidden-size 3072 --lr 0.0006

The tables at the end have the keys. A key is not read where its flags are given. Any other key, and
a value that is not done here, is refused. Absent keys have the defaults of THEIRS, and those of
the model gpt2.

Not covered: Hydra's lists of defaults, other resolvers than RESOLVERS, tokenized data (.bin, .idx).
"""

import collections
import dataclasses
import difflib
import fnmatch
import functools
import math
import operator
import re
import shlex
from pathlib import Path

import yaml

from base import json_files, terminal
from base.json_files import JSONError
from run.config import ConfigError, flag_name
from run.pretraining import Config
from run.tokenizer import make_tokenizer

RESOLVERS = {"multiply": operator.mul, "add": operator.add, "divide_floor": operator.floordiv}
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
# What a value raises that an expression or a table cannot take.
MISFITS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MISFITS += (yaml.YAMLError,)


def refuse(rule: str):
    raise ConfigError(rule)


# --- the file -------------------------------------------------------------------------------------


def name_of(path: tuple) -> str:
    """The name of a key in the tables."""
    named = path[1:] if path[1:] and path[0] in SECTIONS else path
    return ".".join(map(str, named)).replace("--", "").replace("-", "_")


class Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a section. PyYAML would take the last one."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        counts = collections.Counter(str(key.value) for key, _ in node.value)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"{twice[0]} stands there twice from line {line} on")
        return node


# PyYAML alone reads 1e-5, which has no point, as text.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, [*"+-.0123456789"])


def read_file(path: str | Path) -> dict:
    """The content of a YAML file. Raises JSONError."""
    try:
        content = yaml.load(json_files.read_bytes(path), Loader)
    except OSError as e:
        raise JSONError(f"{path}: cannot be read ({e.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise JSONError(f"{path}: not YAML ({json_files.one_line(e)})") from None
    return json_files.convert(content, dict[str, object], str(path))


class Keys:
    """The keys of a file by their names in the tables, and the flags that are known so far.

    given: the flags that win. Raises ConfigError."""

    def __init__(self, content: dict, given: dict, ranks: int):
        self.content, self.given, self.flags, self.ranks = content, given, dict(given), ranks
        self.paths: dict[str, tuple] = {}
        self.add(content, ())
        self.defaults = {}
        for key in THEIRS.keys() & self.paths.keys():
            missing = (name for name in THEIRS[key] if self.raw(name) is None)
            self.defaults |= {name: THEIRS[key][name] for name in missing}
        self.paths |= {name: (name,) for name in self.defaults}
        self.content = content | self.defaults

    def add(self, section: dict, above: tuple) -> None:
        for key, value in section.items():
            path = (*above, key)
            if isinstance(value, dict) and value:
                self.add(value, path)
                continue
            name = name_of(path)
            if self.paths.setdefault(name, path) != path:
                refuse(f"{name} stands there twice")

    def get(self, name: str, default=None):
        """The value of a key; the default if it is absent or null. Raises ConfigError."""
        value = self.find(self.paths[name]) if name in self.paths else None
        return default if value is None else value

    def raw(self, name: str):
        path = self.paths.get(name, ())
        return functools.reduce(operator.getitem, path, self.content) if path else None

    def find(self, path: tuple):
        """The value of a key as it is, or the flag that wins. Raises LookupError, ConfigError."""
        fields, function = TABLE.get(name_of(path), ((), None))
        if len(fields) == 1 and not function and fields[0] in self.given:
            return self.given[fields[0]]
        return self.resolve(functools.reduce(operator.getitem, path, self.content), path)

    def resolve(self, value, path: tuple):
        """A value without OmegaConf's interpolations ${..}. Raises ConfigError."""
        if isinstance(value, list):
            return [self.resolve(each, path) for each in value]
        while isinstance(value, str) and (found := INNERMOST.search(value)):
            inner = self.interpolate(found[1], path)
            start, end = found.span()
            value = inner if found[0] == value else f"{value[:start]}{inner}{value[end:]}"
        if value == "???":
            refuse("??? is to be filled in")
        return value

    def interpolate(self, expression: str, path: tuple):
        function, colon, arguments = expression.partition(":")
        try:
            if colon:
                return RESOLVERS[function](
                    *(yaml.load(x, Loader) + 0 for x in arguments.split(","))
                )
            name = expression.lstrip(".")
            dots = len(expression) - len(name)
            section = path[:-dots] if dots else ()
            # The launcher puts the whole file under `training`.
            return self.find((*section, *name.removeprefix("training.").split(".")))
        except ConfigError:
            raise
        except MISFITS:
            refuse(f"${{{expression}}} has no value here; write one")

    def take(self, name: str) -> str:
        """Add the flags that a key becomes, and return them in words. Raises ConfigError."""
        fields, function = TABLE.get(name, ((), None))
        value = None if self.flags_win(name) else self.get(name)
        if value is None:
            return ""
        if name in ONLY and str(value).lower() not in ONLY[name]:
            whose = " (its default)" if name in self.defaults else ""
            refuse(f"{value}{whose} is not done here; write {ONLY[name][0]}")
        try:
            found = function(value, self) if function else value
            found = found if isinstance(found, tuple) else (found,) * len(fields)
            flags = dict(zip(fields, found, strict=True))
        except ConfigError:
            raise
        except MISFITS:
            refuse(f"{value} does not fit")
        words = []
        for field, own in flags.items():
            if own is not None and field not in self.given:
                json_files.convert(own, TYPES[field], repr(own))
                if self.flags.setdefault(field, own) != own:
                    refuse(f"{own}, but another key says {self.flags[field]}")
                words += as_words(field, own)
        return shlex.join(words)

    def flags_win(self, name: str) -> bool:
        return name in TABLE.keys() - ONLY.keys() and self.given.keys() >= {*TABLE[name][0]}

    def unknown(self) -> list[str]:
        """What to say of each key that is in no table and asks for something. A section that is not
        known is named once. A pattern of IGNORED does not fit what looks like a misspelled key."""
        wrong = set()
        for name in self.paths.keys() - {*TABLE, *ONLY}:
            ignored = any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)
            ignored = ignored and not difflib.get_close_matches(name, KNOWN, 1, 0.94)
            if not ignored and self.raw(name) is not None:
                section = name.partition(".")[0]
                shown = name if section in KNOWN else section
                meant = difflib.get_close_matches(shown, KNOWN - {section}, 1, 0.8)
                cure = f"did you mean {meant[0]}?" if meant else "leave out"
                wrong.add(f"{shown}: not known here; {cure}")
        return sorted(wrong)


def read(path: str, given: dict, rank: int, ranks: int) -> dict:
    """The flags of train.py in a file, as fields. given: the flags that win. Rank 0 prints which
    keys became which flags. Raises ConfigError for all keys that are refused."""
    try:
        keys = Keys(read_file(path), given, ranks)
    except JSONError as e:
        raise ConfigError(f"--config {e}") from None
    except (ConfigError, RecursionError) as e:
        raise ConfigError(f"--config {path}: {e}") from None
    if "task_templates" in keys.paths:
        raise ConfigError(f"--config {path}: is for prompts: -m finetune.prompt_tuning reads it")
    taken, wrong = {}, []
    for name in (name for name in TABLE | ONLY if name in keys.paths):
        try:
            taken[name] = keys.take(name)
        except ValueError as e:
            names = [] if name in ONLY else map(flag_name, TABLE[name][0])
            cure = " or ".join(names)
            wrong.append(f"{name}: {e}{cure and f', or give {cure}'}")
    wrong += keys.unknown()
    if wrong:
        raise ConfigError(f"--config {path}: {'; '.join(wrong)}")
    if "num_layers" in taken and not {"load", "model"} & keys.flags.keys():
        tokenizer = make_tokenizer(keys.flags.get("tokenizer", "bytes"))
        keys.flags = {"model": "gpt2", "vocab_size": tokenizer.vocab_size} | keys.flags
    if rank == 0:
        report(f"--config {path}:", keys, taken)
    return {field: value for field, value in keys.flags.items() if field not in given}


def report(begin: str, keys: Keys, taken: dict[str, str]) -> None:
    """Print which keys became which flags (taken: the flags of each key), and the command line."""
    became = [name for name in taken if taken[name]]
    won = [name for name in taken if keys.flags_win(name)]
    rest = keys.paths.keys() - {*became, *won}
    terminal.say(f"{begin} {', '.join(f'{name}: {taken[name]}' for name in became)}")
    terminal.say(f"{begin} flags win over: {', '.join(won) or 'none'}")
    terminal.say(f"{begin} no effect here: {', '.join(sorted(rest)) or 'none'}")
    launch = f"torchrun --nproc-per-node {keys.ranks}" if keys.ranks > 1 else "python"
    words = [word for field, value in keys.flags.items() for word in as_words(field, value)]
    terminal.say(f"{begin} {launch} {Config.command} {shlex.join(words)}")
    nodes, devices = keys.raw("trainer.num_nodes"), keys.raw("trainer.devices")
    if devices is not None:
        terminal.say(f"{begin} for {nodes or 1} x {devices} ranks; here are {keys.ranks}")


def as_words(field: str, value) -> list[str]:
    if isinstance(value, bool):
        return [flag_name(field if value else f"no_{field}")]
    return [flag_name(field), *map(str, value if isinstance(value, list) else [value])]


# --- values that change: functions of a key's value v and the Keys k ------------------------------


def one_of(**values):
    def choose(v, k):
        word = str(v).lower().replace("-", "_")
        return values[word] if word in values else refuse(f"{v} is none of {', '.join(values)}")

    return choose


def when(value):
    return lambda v, k: value if v else None


def where(condition):
    """A function that leaves a value out where a condition on the keys is not met."""
    return lambda v, k: v if condition(k) else None


def of_replicas(choose):
    """A function for a flag about the ranks that share the batch, where there are several."""

    def chosen(v, k):
        value = choose(v, k)
        alone = k.ranks == k.flags.get("tp", 1) * k.flags.get("pp", 1)
        return None if alone else value or None

    return chosen


def virtual_stages(v, k):
    return k.flags["num_layers"] // k.flags.get("pp", 1) // v


def norm(v, k):
    name = NORM(k.get("normalization", "layernorm"), k)
    offset = k.get("layernorm_zero_centered_gamma") or k.get("apply_layernorm_1p")
    return f"{name.removesuffix('1p')}1p" if offset else name


def swiglu(v, k):
    """Megatron-LM's own inner size is 8/3 h, in whole 64s."""
    h = k.flags.get("hidden_size", 0)
    return ("swiglu", k.get("ffn_hidden_size", h * 8 // 3 // 64 * 64)) if v else None


def bias(v, k):
    linear = k.get("bias", k.get("add_bias_linear", not k.get("disable_bias_linear", False)))
    qkv = "qkv" if k.get("add_qkv_bias", k.get("qkv_bias")) else "none"
    return ("all", True) if linear else (qkv, False)


def window_pattern(v, k):
    """Megatron-LM: in every v-th layer there is none, or a list of 1 and 0."""
    return "".join(map(str, v)) if isinstance(v, list) else "1" * (v - 1) + "0"


def corpora(v, k):
    """[0.3, A, 0.7, B] -> 0.3:A 0.7:B"""
    words = v.split() if isinstance(v, str) else v
    if any(str(word).endswith(("_document", ".bin", ".idx")) for word in words):
        refuse("tokenized .bin is not read; write the folder of the texts")
    if not re.fullmatch(r"[\d.]+", str(words[0])):
        return words
    return [f"{weight}:{path}" for weight, path in zip(words[::2], words[1::2], strict=True)]


def split(v, k):
    shares = [float(share) for share in str(v).split(",")]
    own = "val_data" in k.flags or math.isclose(shares[0], 0.95 * sum(shares))
    return None if own else refuse(f"{v}, but the last twentieth is held out; write 95,5,0")


def decay_steps(v, k):
    steps = k.given.get("steps") or k.get("trainer.max_steps", k.get("train_iters"))
    steps = k.get("lr_decay_iters", steps) - k.get("optim.sched.constant_steps", 0)
    return steps if steps > 0 else refuse("no step is left to the decay")


def warmup(v, k):
    share = k.get("lr_warmup_fraction", 0)
    return round(share * decay_steps(v, k)) if share else k.get("lr_warmup_iters", 0)


def fp8(v, k):
    newest = k.get("fp8_amax_compute_algo", "most_recent") == "most_recent"
    history = 1 if newest else k.get("fp8_amax_history_len", 1)
    if v and (v not in (True, "hybrid") or not k.get("fp8_hybrid", True)):
        refuse(f"{v} is not done here; write hybrid")
    return ("delayed", 0, "any", history) if v else None


# --- the tables -----------------------------------------------------------------------------------

# Keys of these sections are named without them.
SECTIONS = ("model", "language_model", "model_parallel", "MODEL_ARGS")
FLOAT = {"16": "fp16", "16_mixed": "fp16", "bf16": "bf16", "bf16_mixed": "bf16", "32": "fp32"}
FLOAT = one_of(**FLOAT, fp32="fp32")
GATED = dict(swiglu="swiglu", fast_swiglu="swiglu", geglu="geglu", fast_geglu="geglu")
ACTIVATION = one_of(**GATED, gelu="gelu", squared_relu="squared-relu")
NORM = one_of(layernorm="layernorm", rmsnorm="rmsnorm", layernorm1p="layernorm1p")
# NeMo's adam adds the decay to the gradient.
ADAM = dict(adamw=0, fused_adam=0, distributed_fused_adam=1, mcore_distributed_optim=1)
WITH_TP = where(lambda k: k.flags.get("tp", 1) > 1)
GROUPED = where(lambda k: k.get("group_query_attention", True))
ROTARY = where(lambda k: k.flags.get("positions") == "rotary")
DECAY = dict(cosine="cosine", cosineannealing="cosine", linear="linear", wsd="wsd")
DECAY = one_of(**DECAY, polynomialdecayannealing="linear")
POSITIONS = one_of(learned_absolute="learned", rope="rotary", alibi="alibi")
FP16 = {(True, False): "fp16", (False, False): "fp32", (False, True): None}
RECOMPUTE = one_of(selective="selective", full="full")
TOKENIZER = one_of(megatron=None, gpt2bpetokenizer="gpt2")
# Keys that are named as their flags.
SAME = """
num_layers hidden_size ffn_hidden_size make_vocab_size_divisible_by seed micro_batch_size
global_batch_size rampup_batch_size adam_beta1 adam_beta2
"""
# Flags; keys of NeMo and Megatron-LM; the function of the value, where it changes (None: no flag).
ROWS = (
    *((key, key) for key in SAME.split()),
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("virtual_stages", "virtual_pipeline_model_parallel_size"),
    ("virtual_stages", "num_layers_per_virtual_pipeline_stage", virtual_stages),
    ("sequence_parallel", "sequence_parallel", WITH_TP),
    ("zero_stage", "optim.name", of_replicas(one_of(**ADAM))),
    ("zero_stage", "use_distributed_optimizer", of_replicas(when(1))),
    ("zero_stage", "fsdp", of_replicas(when(3))),
    ("reduce_dtype", "optim.grad_sync_dtype", of_replicas(FLOAT)),
    ("num_heads", "num_attention_heads"),
    ("num_kv_heads", "num_query_groups", GROUPED),
    ("head_dim", "kv_channels"),
    ("vocab_size", "vocab_size padded_vocab_size"),
    ("norm", "normalization apply_layernorm_1p layernorm_zero_centered_gamma", norm),
    ("norm_eps", "layernorm_epsilon norm_epsilon"),
    ("activation", "activation activation_func", ACTIVATION),
    ("activation", "squared_relu", when("squared-relu")),
    ("activation ffn_hidden_size", "swiglu", swiglu),
    ("attention_bias mlp_bias", "bias add_bias_linear disable_bias_linear", bias),
    ("attention_bias mlp_bias", "add_qkv_bias qkv_bias", bias),
    ("positions", "position_embedding_type", POSITIONS),
    ("positions", "use_rotary_position_embeddings", when("rotary")),
    ("rotary_share", "rotary_percentage rotary_percent", ROTARY),
    ("rotary_base", "rotary_base", ROTARY),
    # Megatron-LM counts the tokens before.
    ("sliding_window", "window_size", lambda v, k: v[0] + 1),
    ("window_pattern", "window_attn_skip_freq", window_pattern),
    ("seq_length", "encoder_seq_length data.seq_length seq_length"),
    ("seq_length", "max_position_embeddings", lambda v, k: None if ROTARY(v, k) else v),
    ("tied", "share_embeddings_and_output_weights"),
    ("tied", "untie_embeddings_and_output_weights", lambda v, k: not v),
    ("dropout", "hidden_dropout attention_dropout"),
    ("init_std", "init_method_std"),
    ("tokenizer", "tokenizer.library tokenizer.type tokenizer_type", TOKENIZER),
    ("precision", "trainer.precision", FLOAT),
    ("precision", "bf16", when("bf16")),
    ("precision", "fp16", lambda v, k: FP16[bool(v), bool(k.get("bf16"))]),
    ("fp8 fp8_skip fp8_scales fp8_history", "fp8", fp8),
    ("recompute", "activations_checkpoint_granularity recompute_granularity", RECOMPUTE),
    ("recompute", "recompute_activations", when("selective")),
    ("lr", "optim.lr lr"),
    ("lr_schedule", "optim.sched.name lr_decay_style", DECAY),
    ("min_lr", "optim.sched.min_lr min_lr"),
    ("wsd_steps", "lr_wsd_decay_iters", where(lambda k: k.flags.get("lr_schedule") == "wsd")),
    ("warmup_steps", "optim.sched.warmup_steps"),
    ("warmup_steps", "lr_warmup_iters lr_warmup_fraction", warmup),
    ("steps decay_steps", "trainer.max_steps train_iters", lambda v, k: (v, decay_steps(v, k))),
    ("decay_steps", "optim.sched.constant_steps lr_decay_iters", decay_steps),
    ("weight_decay", "optim.weight_decay weight_decay"),
    ("adam_beta1 adam_beta2", "optim.betas", lambda v, k: tuple(v)),
    ("grad_clip", "trainer.gradient_clip_val clip_grad"),
    ("data", "data.data_prefix data.data_prefix.train data_path train_data_path", corpora),
    ("val_data", "data.data_prefix.validation valid_data_path", corpora),
    ("val_data", "data.splits_string split", split),
    ("document_mask", "data.reset_position_ids data.reset_attention_mask"),
    ("document_mask", "reset_position_ids reset_attention_mask"),
    ("eval_every save_every", "trainer.val_check_interval", lambda v, k: (v, v)),
    ("eval_every", "eval_interval"),
    ("save_every", "save_interval"),
    ("keep", "exp_manager.checkpoint_callback_params.save_top_k", lambda v, k: max(v, 0)),
    ("log_every", "trainer.log_every_n_steps log_interval"),
    ("out", "exp_manager.explicit_log_dir save"),
    ("out", "exp_manager.exp_dir", lambda v, k: f"{v}/{k.get('exp_manager.name', 'default')}"),
    ("resume", "exp_manager.resume_if_exists", when(True)),
    ("resume", "load", lambda v, k: v == k.get("save") or refuse(f"{v} is not save; write null")),
    ("load", "restore_from_path", lambda v, k: refuse(f"{v} is to be imported first")),
    ("timeout", "distributed_timeout_minutes", lambda v, k: v * 60.0),
)
TYPES = {field.name: field.type for field in dataclasses.fields(Config)}
# key -> (flags, function)
TABLE = {
    key: (flags.split(), function[0] if function else None)
    for flags, keys, *function in ROWS
    for key in keys.split()
}
# Keys that have one value here, beside null.
ONE_VALUE = """
optimizer=adam optim.eps=1e-08 adam_eps=1e-08 optim.sched.power=1.0 lr_wsd_decay_style=exponential
fsdp_sharding_strategy=full fsdp_grad_reduce_dtype=32|fp32 fp8_recipe=delayed fp8_wgrad=true
transformer_block_type=pre_ln attention_type=multihead use_scaled_init_method=true
normalize_attention_scores=true trainer.accumulate_grad_batches=1 weight_decay_incr_style=constant
trainer.limit_train_batches=1.0
"""
OFF = """
num_moe_experts num_experts fp8_e4m3 fp8_margin fp32_residual_connection
fp16_lm_cross_entropy headscale ffn_dropout apply_residual_connection_post_layernorm mock_data
rotary_interleaved multi_latent_attention gated_linear_unit cpu_offloading finetune skip_train
data.eod_mask_loss eod_mask_loss data.no_seqlen_plus_one_input_tokens do_layer_norm_weight_decay
data.pad_samples_to_global_batch_size lr_warmup_init exit_interval data_parallel_random_init
num_micro_batches_with_partial_activation_checkpoints activations_checkpoint_layers_per_pipeline
train_samples lr_decay_samples lr_warmup_samples use_checkpoint_args
"""
# key -> its values
ONLY = {key: values.split("|") for key, values in (row.split("=") for row in ONE_VALUE.split())}
ONLY["optim.name"] = [*ADAM]
ONLY |= dict.fromkeys(OFF.split(), ("null", "false", "0", "0.0"))
# Keys about speed, memory, files, logs, evaluation and when a job ends (max_time): they change no
# number of a step. * is any text.
IGNORED = """
name run.* hydra.* defaults nsys_profile.* ENV_VARS.* TEST_TYPE METRICS exp_manager.* tokenizer*
trainer.accelerator trainer.logger trainer.enable_* trainer.max_epochs trainer.max_time
trainer.devices trainer.num_nodes trainer.limit_* trainer.benchmark trainer.*_sampler*
optim.bucket_cap_mb optim.*_sync optim.contiguous_* data.data_impl data.*_warmup *num_workers
*dataloader_type data.*.test data.*_drop_last data.shuffle_* *_file *_extra_ids mcore_* use_*_models
use_flash_attn use_flash_attention use_emha pre_process post_process transformer_engine
transformer_impl apply_query_* attention_softmax_* onnx_safe openai_gelu *persist_layer_norm
memory_efficient_layer_norm *_fusion *_initialization add_position_embedding group_query_attention
deterministic_mode native_amp_* hysteresis *_loss_scale loss_scale_window megatron_amp_O2
grad_allreduce_* apex_* sharp gradient_as_* sync_* accumulate_allreduce_* enable_autocast
fsdp_sharded_checkpoint fp8_hybrid fp8_interval fp8_amax_* *_checkpoint_method
*_checkpoint_num_layers recompute_* clone_scatter_* async_* moe_* variable_* *tp_comm_* *_p2p*
deallocate_* cpu_offloading_* barrier_* check_for_* exit_*_* bert_* sgd_* override_* use_*_scheduler
distributed_* overlap_* delay_* scatter_* empty_* standalone_* adlr_* gc_* reduce_amax eval_iters
manual_gc* data_cache_path retriever_* sample_rate *_prob profile* log_* timing_* *tensorboard*
wandb_* *one_logger* *ckpt_format* no_mmap_* save_retain_*
""".split()
KNOWN = {*TABLE, *ONLY, *SECTIONS}
KNOWN |= {key.partition(".")[0] for key in KNOWN}
# What keys mean that are absent or null: of Megatron-LM's files, with lr; of NeMo's, with optim.lr.
THEIRS = yaml.safe_load("""
lr: {lr_decay_style: linear, lr_warmup_iters: 0, min_lr: 0.0, weight_decay: 0.01, adam_beta1: 0.9,
  adam_beta2: 0.999, clip_grad: 1.0, fp16: false, seed: 1234, hidden_dropout: 0.1,
  attention_dropout: 0.1, reset_position_ids: false, reset_attention_mask: false}
optim.lr: {optim.sched.name: constant, optim.sched.min_lr: 0.0, optim.sched.warmup_steps: 0,
  optim.betas: [0.9, 0.999], optim.weight_decay: "???", trainer.gradient_clip_val: 0.0,
  hidden_dropout: 0.1, attention_dropout: 0.1, data.reset_position_ids: false,
  data.reset_attention_mask: false}
""")
