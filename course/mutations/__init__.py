"""Silent bugs of distributed training, each a few lines that change this project.

A parallel layout needs each of its synchronisations. Without one of them training still runs, and
the loss may still fall. Each function here removes one, in the process that calls it. Most of them
take the place of another function:

    @bug(2, dict(micro_batch_size=2), first="step 1: gradient of head.norm")
    @replaces(fsdp.DataParallel, "accumulate")
    def no_accumulation(self, p, original=fsdp.DataParallel.accumulate):
        \"\"\"Only the last micro-batch's gradient remains.\"\"\"

2 ranks with these flags of train.py are the layout in which it shows, and `first` is what verify.py
then names. This is the one list: the tests remove each in turn and expect the comparison with one
device to fail; lessons (`--without`), `bugs.py` and the bug hunts of `course/exercises/` use it
too.

    python -m course.exercises.bugs              the list
    python -m course.exercises.bugs no-f         what it does to loss and gradients
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Bug:
    # As in no-f.
    name: str
    # The module of this package, named after the technique.
    technique: str
    # What is wrong, in a sentence.
    removes: str
    # Its code: `apply`, or what `apply` puts in the place of another function.
    function: Callable
    # Removes it, in this process; can be sent to ranks.
    apply: Callable[[], None]
    # The number of ranks.
    world: int
    # Flags of train.py, for each layout in which it shows.
    layouts: tuple[dict, ...]
    # A regular expression of the first tensor that differs, in the words of verify.py.
    first: str

    @property
    def flags(self) -> dict:
        """The first layout."""
        return self.layouts[0]


# Flags that change the model, not the layout.
OF_THE_MODEL = (
    *("num_experts", "router", "router_topk", "aux_loss", "z_loss"),
    *("model", "num_kv_heads", "head_dim", "ffn_hidden_size", "positions", "sliding_window"),
    *("seq_length", "document_mask", "dropout", "command", "method"),
    *("peft", "lora_rank", "lora_alpha", "lora_dropout", "adapter_size", "peft_targets"),
    *("encoder_layers", "target_length", "num_layers", "mtp_layers"),
    *("fp8", "fp8_skip", "fp8_scales", "fp8_block"),
)


def of_one_device(flags: dict) -> dict:
    """The flags of a layout with which one device computes the same. Routers balance within a
    micro-batch, and FP8 scales are made from one, so then its size is kept."""
    kept = {name: value for name, value in flags.items() if name in OF_THE_MODEL}
    if "num_experts" in kept or "fp8" in kept:
        kept["micro_batch_size"] = flags["micro_batch_size"]
    return kept


_BUGS: dict[str, Bug] = {}


def bug(world: int, *layouts: dict, first: str):
    """Lists a function without arguments, or one that `replaces` another. world: ranks; layouts:
    flags of train.py for each; first: where it shows first."""

    def enter(function: Callable) -> Callable[[], None]:
        name = function.__name__.replace("_", "-")
        apply = function
        if hasattr(function, "replaces"):
            apply = partial(replace, function.__module__, name)
        technique = function.__module__.split(".")[-1]
        removes = " ".join(function.__doc__.split())
        _BUGS[name] = Bug(name, technique, removes, function, apply, world, layouts, first)
        return apply

    return enter


def replaces(owner: Any, attribute: str):
    """Marks a function that takes the place of another. owner: a class or a module."""

    def mark(function: Callable) -> Callable:
        function.replaces = owner, attribute
        return function

    return mark


def replace(module: str, name: str) -> None:
    """Apply a bug whose function replaces another. module: that defines it."""
    importlib.import_module(module)
    function = _BUGS[name].function
    setattr(*function.replaces, function)


def bugs() -> dict[str, Bug]:
    """Name -> bug, all of them, by technique. Imports every technique."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_BUGS.items(), key=lambda item: item[1].technique))
