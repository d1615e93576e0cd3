"""Training on text, of which every token counts: what train.py does.

TextConfig     the flags of every run, and those of its text
Config         the flags of train.py
Pretraining    the task: the corpus, and how the sample at the end begins
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

from base.model_config import CHOICES, MoEConfig
from optimizer import DECAYS
from run import data
from run.config import ConfigError, RunConfig, flag
from run.rules import Need
from run.task import Task
from run.tokenizer import TokenizerError, prompt_ids


@dataclass
class TextConfig(RunConfig):
    """The flags of a run that learns text."""

    # What --load without --data could have meant, for a message.
    other_training: ClassVar[str] = ""

    # Data.
    data: list[str] = flag(
        [],
        "text files, .jsonl files with a text field, both also gzipped, or folders; or corpora with"
        " weights: 0.7:A 0.3:B; the last twentieth is held out; the default is Python's library",
        metavar="PATH",
    )
    val_data: list[str] = flag(
        [], "text to evaluate on, as --data, of which then all is trained on", metavar="PATH"
    )
    document_mask: bool = flag(False, "attention and positions stay inside a document of --data")
    cache: str = flag("cache", "tokenized text, for other runs too; may be deleted", metavar="DIR")
    skip_bad_examples: bool = flag(False, "leave out, and count, files that are not UTF-8")

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        """Check that a loaded model goes on with text that somebody has chosen. Raises
        ConfigError."""
        if self.load and base_needed and not self.data and not self.resume:
            self.refuse("load", f"learns from what? --data PATH names text{self.other_training}")


@dataclass
class Config(TextConfig):
    """Every flag of train.py."""

    needs: ClassVar[tuple] = (
        Need(("init_std",), lambda run: not run.config.load, "--load gives the weights"),
        Need(
            ("rotary_base", "rotary_share", "rotary_factor"),
            lambda run: run.model.positions == "rotary",
            "needs --positions rotary",
        ),
        Need(
            ("wsd_steps",), lambda run: run.config.lr_schedule == "wsd", "needs --lr-schedule wsd"
        ),
        Need(
            ("wsd_steps",),
            lambda run: (run.config.wsd_steps or 0) < (run.config.decay_steps or run.config.steps),
            "leaves no step at --lr; fewer than --steps (or --decay-steps) would",
        ),
        Need(
            ("rotary_scaling", "rotary_original_length"),
            lambda run: run.model.rotary_factor > 1,
            "needs --rotary-factor above 1",
        ),
        Need(("fp8_history",), lambda run: run.config.fp8 == "delayed", "needs --fp8 delayed"),
        Need(("adam_beta1", "adam_beta2"), lambda run: max(run.config.adam[1]) < 1, "must be < 1"),
        Need(
            ("adam_beta2",),
            lambda run: run.config.adam_beta2 <= 0.99 or run.config.optimizer_state == "fp32",
            "must be at most 0.99 with --optimizer-state bf16",
        ),
        Need(("optimizer",), lambda run: run.config.optimizer_state == "fp32", "has fp32 state"),
        Need(("mtp_layers",), lambda run: not run.config.load, "--load gives a model without them"),
        Need(("mtp_loss_weight",), lambda run: run.config.mtp_layers, "needs --mtp-layers"),
    )
    supports_as_rank: ClassVar[bool] = True
    other_training: ClassVar[str] = "; python -m finetune.sft learns from conversations"

    attention_bias: str | None = flag(
        None, "which of query, key, value, output have a bias", CHOICES["attention_bias"]
    )
    mlp_bias: bool | None = flag(None, "biases in the MLP")
    tied: bool | None = flag(None, "embedding and head are one matrix")
    norm_eps: float | None = flag(None, "added to the variance in a norm")
    rotary_base: float | None = flag(None, "base of the rotary angles")
    rotary_share: float | None = flag(None, "share of a head that is rotated")
    window_pattern: str | None = flag(None, "layers with --sliding-window: 10 is every other")
    rotary_factor: float | None = flag(None, "how much slower rotary angles turn; 1: not")
    rotary_scaling: str | None = flag(
        None, "rule that slows rotary angles for longer sequences", CHOICES["rotary_scaling"]
    )
    rotary_original_length: int | None = flag(None, "length that the model was trained on")
    init_std: float | None = flag(None, "standard deviation of initial weights, gpt.py")
    mtp_layers: int = flag(0, "modules that predict further tokens, arXiv 2412.19437", least=0)
    mtp_loss_weight: float = flag(0.3, "weight of the further tokens' mean loss", least=0)
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", least=0)
    adam_beta2: float = flag(0.95, "decay of Adam's second moment", least=0)
    optimizer: str = flag(
        "adamw", "muon: for the matrices of blocks; AdamW for the rest", ("adamw", "muon")
    )
    rampup_batch_size: list[int] | None = flag(
        None,
        "START INCREMENT SAMPLES: the batch grows from START by INCREMENT to --global-batch-size"
        " while SAMPLES sequences are taken; --plan and --as-rank are about the last size",
        metavar="N",
    )
    lr_schedule: str = flag(
        "cosine", "how the rate falls after warmup; wsd: in the last steps only", tuple(DECAYS)
    )
    decay_steps: int | None = flag(None, "step where the decay ends; default: --steps", least=1)
    wsd_steps: int | None = flag(None, "last steps, in which wsd decays; default: a tenth", least=1)
    fp8_history: int = flag(16, "steps whose maximum --fp8 delayed takes", least=1)
    sample_prompt: str | None = flag(
        None,
        "text that the sample at the end continues, the last tokens of it that fit; empty: a new"
        " text; the default is the beginning of the held-out data",
        metavar="TEXT",
    )

    def task(self) -> Task:
        if self.mtp_layers:
            from run.multi_token import MultiToken

            return MultiToken(Pretraining(), self.mtp_loss_weight)
        return Pretraining()


class Pretraining(Task):
    """The task of learning text."""

    def open_data(self, config: Config, world, tokenizer):
        """Open the corpus, tokenized first if need be. Raises DataError, and ConfigError for a
        --sample-prompt that is not text."""
        if config.sample_prompt is not None:
            sample_ids(config, tokenizer)
        return open_text(config, world, tokenizer, config.model_config().seq_length)

    def sample_prompt(self, tokenizer, held_out) -> tuple[list[int], tuple[int, ...]]:
        if self.config.sample_prompt is None:
            return super().sample_prompt(tokenizer, held_out)
        return sample_ids(self.config, tokenizer), tokenizer.stop_ids

    def check_base(self, path, index: dict) -> None:
        """Raises ConfigError where the checkpoint has the state of another optimizer."""
        before = index["config"].get("optimizer", "adamw")
        if before != self.config.optimizer:
            rule = f"{path} has the state of {before}; --optimizer {before} goes on, and --load"
            self.config.refuse("optimizer", f"{rule} {path} in another --out begins anew")

    def data_name(self, corpus: str) -> str:
        if self.config.data:
            return super().data_name(corpus)
        return f"Python {sys.version.split()[0]}'s library"


def open_text(config: TextConfig, world, tokenizer, s: int):
    """(training set, held-out set) of sequences of s tokens. Raises DataError."""
    share = dict(cache=config.cache, world=world, workers=world.cores)
    share |= dict(skip_bad=config.skip_bad_examples)
    parts = data.prepare_corpora(config.data, tokenizer, **share)
    masked = config.document_mask
    if not config.val_data:
        train_set = data.open_corpora(parts, s, config.seed, "train", masked)
        return train_set, data.open_corpora(parts, s, None, "held-out", masked)
    val_parts = data.prepare_corpora(config.val_data, tokenizer, "--val-data", **share)
    train_set = data.open_corpora(parts, s, config.seed, "all", masked)
    return train_set, data.open_corpora(val_parts, s, None, "all", masked)


def sample_ids(config, tokenizer) -> list[int]:
    """The ids of --sample-prompt. Raises ConfigError for what is not text."""
    try:
        ids = prompt_ids(tokenizer, config.sample_prompt)
    except (UnicodeEncodeError, TokenizerError) as e:
        prompt = config.sample_prompt
        raise ConfigError(f"--sample-prompt {prompt!r}: cannot be encoded ({e})") from None
    return ids[-config.model_config().seq_length :]
