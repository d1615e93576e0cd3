"""Training of models that read pictures: the tasks, and the flags.

    torchrun --nproc-per-node 2 -m models.vit --data digits --tp 2 --out runs/digits

PictureTask        what their tasks share
PictureRun         the flags of train.py that they have; TextlessRun without those of text
LabelTask, ViTRun  of models/vit.py
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from base.cross_entropy import cross_entropy
from base.model_config import GPTConfig, MoEConfig, attention_matrices, mlp_matrices
from models import pictures
from models.picture_data import Labelled
from models.pictures import Batch, Examples
from models.runs import ModelRun
from models.vit import ViTConfig
from run import checkpoint
from run.config import RunConfig, flag, flag_name
from run.data import DataError
from run.presets import Recipe
from run.task import Task, WholeModel, evaluation_batches, outputs

# Pictures of the sample at the end.
SHOWN = 10


class PictureTask(Task):
    """A model that reads pictures; one loss for each."""

    sample_name = "held-out pictures"
    sampled_by_all = True
    batch_class = Batch
    # What the last evaluation has measured, beside the loss.
    measured: dict[str, float] | None = None

    def open_data(self, config, world, tokenizer):
        """Raises DataError."""
        examples = pictures.open_pictures(config.data, self.side(config), config.edit)
        self.prepare(config, examples)
        train_set = self.dataset(config, examples, tokenizer, config.seed, False)
        held_out = self.dataset(config, examples, tokenizer, None, True)
        world.say(f"pictures of {config.data_name}: {train_set.describe()}")
        return train_set, held_out

    def side(self, config: RunConfig) -> int:
        """Pixels of a picture's side."""
        return config.model_config().picture_size

    def prepare(self, config: RunConfig, examples: Examples) -> None:
        """Learn from the examples what the configuration leaves open. Raises DataError."""

    def dataset(self, config, examples, tokenizer, seed: int | None, held_out: bool):
        """The training set, or the held-out one."""
        raise NotImplementedError

    def data_name(self, corpus: str) -> str:
        return self.config.data_name

    def flops_per_token(self, s: int) -> float:
        """Over the positions of a sequence; the embedding and the head hardly count."""
        shape = self.model_config
        return flops_of_blocks(shape, shape.num_layers, s) / s * self.learned.share_of_flops

    def eval_statistics(self) -> dict[str, float]:
        return self.measured or {}

    def heads_output(self, dataset, n: int, shape: tuple[int, ...]) -> Tensor:
        """What the head gives without targets for the first n samples, [n, *shape], float64. A
        collective."""
        batches = evaluation_batches(self.trainer, dataset, n)
        without = [batch._replace(targets=None) for batch in batches]
        return outputs(self.trainer, without, (n, *shape))


def flops_of_blocks(shape: GPTConfig, layers: int, s: int) -> float:
    """FLOPs of training so many blocks of this shape on a sequence of s positions."""
    weights = attention_matrices(shape) + mlp_matrices(shape)
    return layers * s * (6 * weights + 12 * s * shape.num_heads * shape.head_dim)


class LabelHead(WholeModel):
    """Every parameter learns; after --load of a model with other labels, the head's from anew."""

    def load_weights(self, world) -> None:
        if self.config.load:
            path, other = checkpoint.find(self.config.load), self.trainer.task.other_labels
            new = (lambda name: name.startswith("head.output.")) if other else None
            self.trainer.checkpoints.load(path, weights_only=True, new=new)
            world.say(f"starting from the weights of {path}{', for other labels' * other}")


class LabelTask(PictureTask):
    """A Vision Transformer labels a picture (arXiv 2010.11929, section 3.1)."""

    labels: list[str]

    def __init__(self):
        super().__init__(LabelHead())

    def prepare(self, config, examples) -> None:
        found = set(examples.labels)
        if "" in found or len(found) < 2:
            rule = "needs two labels or more, and a label for each picture"
            raise DataError(f"--data {config.data_name}: {rule}")
        base = checkpoint.read_index(config.base()).get("labels") if config.load else None
        # A base that knows all of these labels keeps its head.
        self.labels = base if base and found <= set(base) else sorted(found)
        self.other_labels = bool(config.load) and self.labels != base
        # A run that goes on has its --classes, and check_base says where its labels are others.
        if config.classes is None or config.resume:
            config.classes = len(self.labels)
        elif config.classes != len(self.labels):
            config.refuse("classes", f"the data has {len(self.labels)} labels")

    def dataset(self, config, examples, tokenizer, seed, held_out) -> Labelled:
        s = config.model_config().seq_length
        return Labelled(examples, s, seed, held_out, labels=self.labels)

    def extra_state(self) -> dict:
        return {"labels": self.labels}

    def check_base(self, path, index: dict) -> None:
        if index.get("labels") != self.labels:
            self.config.refuse("data", f"has other labels than {path}; give the data of the run")

    def logits(self, dataset, n: int) -> Tensor:
        """[n, classes]. A collective."""
        return self.heads_output(dataset, n, (1, self.model_config.classes))[:, 0]

    def evaluate(self, dataset, sequences: int) -> float:
        logits = self.logits(dataset, sequences)
        targets = dataset.batch(range(sequences)).targets.squeeze(1)
        accuracy = (logits.argmax(1) == targets).double().mean().item()
        self.measured = {"eval_accuracy": accuracy}
        return cross_entropy(logits, targets, logits.shape[1]).mean().item()

    @torch.no_grad()
    def sample(self, tokenizer, held_out) -> str:
        n = min(SHOWN, held_out.num_sequences)
        found = self.logits(held_out, n).argmax(1).tolist()
        right = (held_out.example(k).label for k in range(n))
        return "\n".join(f"{self.labels[k]} (right: {name})" for k, name in zip(found, right))


# --- flags ----------------------------------------------------------------------------------------


@dataclass
class PictureRun(ModelRun):
    """The flags of a run of a model that reads pictures."""

    # It follows from the picture; there is no row of tokens.
    seq_length: ClassVar[None] = None
    cp: ClassVar[int] = 1
    cp_kind: ClassVar[str] = "ring"
    head_chunk: ClassVar[int] = 0
    # Whether a picture comes with one that it is an edit of.
    edit: ClassVar[bool] = False
    # The flag that makes a sequence longer, until --tp divides it.
    longer_by: ClassVar[str] = ""

    picture_size: int | None = flag(None, "pixels of a picture's side", least=1)
    patch_size: int | None = flag(None, "pixels of a patch's side", least=1)
    data: list[str] = flag(
        [],
        "shapes (drawn; the default), digits (scikit-learn), or a folder",
        metavar="NAME",
    )

    @property
    def unpredicted(self) -> str:
        return "reads pictures"

    @property
    def data_name(self) -> str:
        return self.data[0] if self.data else "shapes"

    def model_config(self) -> MoEConfig:
        shape = super().model_config()
        if self.sequence_parallel and shape.seq_length % self.tp:
            self.refuse("sequence_parallel", self.why_no_shards(shape))
        return shape

    def why_no_shards(self, shape) -> str:
        n, before = shape.num_patches, shape.positions_before
        rule = f"--tp {self.tp} does not divide {n} patches and {before} positions before them"
        if self.longer_by:
            fits = getattr(shape, self.longer_by) + -shape.seq_length % self.tp
            rule += f"; {flag_name(self.longer_by)} {fits} would fit"
        return rule

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        if len(self.data) > 1:
            self.refuse("data", "names one set of pictures")


@dataclass
class TextlessRun(PictureRun):
    """The same of a model without a vocabulary."""

    vocab_size: ClassVar[None] = None
    make_vocab_size_divisible_by: ClassVar[None] = None
    # It has no use, and the tokenizer of --load may be missing.
    tokenizer: ClassVar[str] = "bytes"

    def num_ids(self, tokenizer) -> int:
        return self.model_config().vocab_size


TINY = dict(num_layers=4, hidden_size=128, num_heads=4, picture_size=32, patch_size=4)
VIT_PRESETS: dict[str, tuple[dict, float]] = {
    "tiny": (TINY | dict(classes=16), 0),
    "vit-base": (dict(num_layers=12, hidden_size=768, num_heads=12), 86_567_656),
    "vit-large": (dict(num_layers=24, hidden_size=1024, num_heads=16), 304_326_632),
    "vit-huge": (dict(num_layers=32, hidden_size=1280, num_heads=16, patch_size=14), 632_045_800),
}
VIT_RECIPES = {
    "tiny": Recipe("a small ViT", 1e-3, 0, 0),
    "": Recipe("a ViT (arXiv 2010.11929, table 3)", 3e-3, 0, 0),
}


@dataclass
class ViTRun(TextlessRun):
    """Every flag of python -m models.vit."""

    command: ClassVar[str] = "-m models.vit"
    purpose: ClassVar[str] = "Train a Vision Transformer to label pictures."
    presets: ClassVar[dict] = VIT_PRESETS
    shape_class: ClassVar[type] = ViTConfig
    recipes: ClassVar[dict[str, Recipe]] = VIT_RECIPES
    longer_by: ClassVar[str] = "class_tokens"

    model: str = flag("tiny", f"a preset: {', '.join(VIT_PRESETS)}", metavar="PRESET")
    class_tokens: int | None = flag(None, "positions before the patches; 0: the mean is read")
    classes: int | None = flag(None, "labels; the default is those of the data")

    def task(self) -> LabelTask:
        return LabelTask()
