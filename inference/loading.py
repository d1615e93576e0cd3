"""A model to generate with: from a checkpoint, a run or a Hugging Face folder, under any layout.

    model, index = load_model("runs/default", groups=groups)
    tokenizer = find_tokenizer("runs/default", index)

The stages are built on the meta device, sharded over the ranks, and only then filled: each rank
reads its own slices. The layout need not be that of training.

    python generate.py --checkpoint runs/default --prompt "def "

Not covered: a model that is larger than the memory of all ranks; weights that become 8 or 4 bits
while they are read (inference/quantization.py makes them so layer by layer, after all were read).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import families
import moe
import pipeline_parallel
import sharding
import tensor_parallel
from base.groups import Groups
from base.model_config import MoEConfig
from finetune import frozen_base
from finetune.chat import Chat
from finetune.chat_template import ChatTokenizer, open_template
from gpt import GPT
from inference import huggingface
from inference.hf_config import read_any_model
from run import checkpoint, multi_token
from run.checkpoint import beside
from run.tokenizer import CHAT_TEMPLATE, TokenizerError, make_tokenizer
from schedules import Placement
from sharding import shard_of, sharding_of


def open_model(path: Path | str, shape_class: type[MoEConfig] | None = MoEConfig):
    """(configuration, index, read) of the model in a checkpoint, a run or a Hugging Face folder.

    index: the index of the checkpoint; of a Hugging Face folder, the same keys. read(name): a whole
    parameter of a Hugging Face folder; for a checkpoint, read is None. shape_class: of the
    configuration, that of models/ for its models; None: any. Raises CheckpointError or
    HuggingFaceError."""
    if huggingface.is_folder(path):
        config, read, tokenizer = huggingface.open_folder(Path(path), shape_class)
        index = {"model": dataclasses.asdict(config), "config": {"tokenizer": tokenizer}, "step": 0}
        return config, index, read
    path = checkpoint.find(path)
    if shape_class is None:
        return *read_any_model(path), None
    config, index = checkpoint.read_model(path, shape_class=shape_class)
    return config, index, None


def read_base(
    path: Path | str,
    names: list[str],
    first: bool = False,
    shape_class: type[MoEConfig] = MoEConfig,
) -> dict[str, Tensor]:
    """finetune.frozen_base.read_base, which also reads a Hugging Face folder. shape_class: as of
    `open_model`."""
    if not huggingface.is_folder(path):
        return frozen_base.read_base(path, names, first)
    _, read, _ = huggingface.open_folder(Path(path), shape_class)
    return {name: read(name)[:1] if first else read(name) for name in names}


def load_model(
    path: Path | str,
    device="cpu",
    dtype: torch.dtype = torch.float32,
    groups: Groups | None = None,
    layer_split: list[int] | None = None,
    shape_class: type[MoEConfig] | None = MoEConfig,
    modules: bool = False,
):
    """(model, index) from a checkpoint, the folder of a run (its newest checkpoint), or a Hugging
    Face folder. model: a GPT, or over pipeline stages a Pipeline; sharded over the ranks of
    `groups`. index, shape_class: as of `open_model`. modules: with those of run/multi_token.py. A
    collective: all ranks call it. Raises CheckpointError, HuggingFaceError, or ValueError for a
    layout that is not possible."""
    groups = groups or Groups()
    config, index, read = open_model(path, shape_class)
    stages = build_stages(config, groups, layer_split, device, modules)
    numbers = sum(p.numel() for stage in stages for p in stage.parameters())
    checkpoint.check_room(str(path), numbers * dtype.itemsize, device)
    model = materialise(stages, groups, device, dtype)
    parameters = dict(sharding.named_parameters(*stages))
    if read:
        for name, p in parameters.items():
            p.copy_(shard_of(read(name), sharding_of(p)))
    else:
        tensors = {f"model.{name}": p for name, p in parameters.items()}
        checkpoint.load(checkpoint.find(path), tensors)
    return model, index


def build_stages(
    config: MoEConfig,
    groups: Groups,
    layer_split: list[int] | None = None,
    device="cpu",
    modules: bool = False,
) -> list[GPT]:
    """This rank's stages of a model, on the meta device. Sequence parallelism is left out: a step
    of one token has no sequence to shard. device: where they will be."""
    with torch.device("meta"):
        model = families.build(config)
    if config.num_experts:
        moe.apply(model, groups.ep, groups.tp)
    stages = [model]
    if groups.pp:
        placement = Placement(groups.pp.size())
        stages = pipeline_parallel.apply(model, groups.pp.rank(), placement, layer_split)
    for stage in stages:
        if modules:
            multi_token.add(stage, groups)
        tensor_parallel.pad_vocabulary(stage, torch.device(device), groups.tp)
        if groups.tp:
            tensor_parallel.apply(stage, groups.tp)
        if modules:
            multi_token.share_embedding(stage, first=True)
    return stages


def materialise(stages: list[GPT], groups: Groups, device, dtype: torch.dtype):
    """Give this rank's stages on the meta device storage, for values that are to come. Returns the
    model that generates: a GPT, or over pipeline stages a Pipeline."""
    for stage in stages:
        sharding.materialise(stage, device, dtype)
        stage.requires_grad_(False).eval()
    if not groups.pp:
        return stages[0]
    channels = pipeline_parallel.Channels(groups.pp, groups.nccl)
    return pipeline_parallel.Pipeline(stages, channels, Placement(groups.pp.size()))


def find_tokenizer(path: Path | str, index: dict, given: str | None = None):
    """The tokenizer that a model was trained with: the one in the folder, or the one that its index
    names. given: another one instead. Raises TokenizerError; CheckpointError where the file in the
    folder is not the one of training."""
    if given is None and huggingface.is_folder(path):
        given = str(index["config"]["tokenizer"])
    if given is None:
        given = checkpoint.tokenizer_of(checkpoint.find(path))
    return make_tokenizer(given)


def find_chat(path: Path | str, tokenizer, adapters: Sequence[str] = ()) -> Chat:
    """The chat template that a model was trained with, or that its tokenizer has; the plain one
    where there is none. adapters: runs whose template comes first. Raises ChatError, or
    CheckpointError."""
    copy = None
    for folder in (*adapters, path):
        if copy is None and not huggingface.is_folder(folder):
            copy = beside(checkpoint.find(folder), CHAT_TEMPLATE)
    chat_tokenizer = ChatTokenizer(tokenizer)
    return Chat(open_template("auto", chat_tokenizer, copy), chat_tokenizer)


def check_vocabulary(tokenizer, given: str | None, vocab_size: int) -> None:
    """Fit a tokenizer to the vocabulary of a model. given: of --tokenizer. Raises TokenizerError
    where the model does not know all ids."""
    if tokenizer.vocab_size == vocab_size + 1 and tokenizer.eot == vocab_size:
        # The vocabulary had no end of text, and one was added after it: the model cannot give it.
        tokenizer.vocab_size = vocab_size
        tokenizer.eot = None
        tokenizer.stop_ids = ()
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"--tokenizer {given or tokenizer.name}: its ids go up to {tokenizer.vocab_size - 1}, "
            f"and the model knows {vocab_size}; name the one that it was trained with"
        )
