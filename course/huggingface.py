"""The lesson of inference/huggingface.py: a small GPT-2 there and back, and what their files hold.

python -m course.huggingface
"""

import dataclasses
import importlib.util
import tempfile
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

import sharding
from base.model_config import MoEConfig
from course import demo, form
from inference import huggingface
from inference.architectures import Location, empty_model
from run import checkpoint

H, V = 64, 257


def view_as_it_is(self, theirs: Tensor, original=Location.view) -> Tensor:
    """Square matrices go there and back as they are."""
    view = original(self, theirs)
    is_square = view.dim() == 2 and view.shape[0] == view.shape[1]
    return view.t() if is_square and self.transposed else view


def view_of_another_third(self, theirs: Tensor, original=Location.view) -> Tensor:
    """Key and value change places, there and back."""
    third = {1: 2, 2: 1}.get(self.third, self.third)
    return original(self._replace(third=third), theirs)


WITHOUT = {
    "transpose": form.Removal(
        lambda: mock.patch.object(Location, "view", view_as_it_is),
        "There and back, every bit is equal. Which check sees it?",
        "The one that looks into their file, and the one that asks transformers for logits."
        " Nothing is transposed on the way there, nor on the way back. A square matrix keeps its"
        " shape, so no size is wrong.",
    ),
    "order": form.Removal(
        lambda: mock.patch.object(Location, "view", view_of_another_third),
        "Key and value change places, both ways. Which check sees it?",
        "The one that looks for the columns of the key, and the one that asks transformers for"
        " logits. Both ways make the same mistake, so every tensor comes back. Key and value have"
        " one shape here, so no size is wrong.",
    ),
}


def make_model() -> torch.nn.Module:
    """A GPT-2 with random weights, float32; no bias is 0."""
    model = empty_model(demo.tiny_config(MoEConfig))
    sharding.init(model, 0, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.02)
    return model


def teach(lesson: form.Lesson) -> None:
    model = make_model()
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    config = dataclasses.asdict(model.config)
    with tempfile.TemporaryDirectory() as folder, lesson.removed():
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        state = {"config": {"tokenizer": "bytes"}, "model": config}
        checkpoint.write(ours, 0, parameters, state)
        huggingface.export_folder(ours, theirs)
        names(lesson, parameters, theirs)
        columns(lesson, model, theirs)
        back(lesson, parameters, theirs, Path(folder) / "back")
        sizes(lesson, parameters, ours, Path(folder) / "bf16")
        logits(lesson, model, theirs)


def names(lesson: form.Lesson, parameters: dict[str, Tensor], folder: Path) -> None:
    lesson.predict(
        f"A GPT-2 (L 2) has {len(parameters)} tensors here. Theirs has one c_attn for query, key"
        " and value, weights and biases. How many tensors are in their file?",
        "tensors",
    )
    count = len(load_file(folder / "model.safetensors"))
    expected = len(parameters) - 2 * (6 - 2)
    lesson.check(
        f"{count}; in each of 2 layers 2 take the place of 6: {expected}",
        count == expected,
        [count],
    )


def columns(lesson: form.Lesson, model, folder: Path) -> None:
    lesson.predict(
        f"h {H}: which columns of layer 0's c_attn.weight [{H}, {3 * H}] are our key.weight, and is"
        " it transposed there?"
    )
    c_attn = load_file(folder / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    key = model.blocks["0"].attention.key.weight
    found = []
    for first in range(0, 3 * H, H):
        block = c_attn[:, first : first + H]
        for word, candidate in (("as it is", block), ("transposed", block.t())):
            if torch.equal(candidate, key):
                found.append(f"columns {first} to {first + H - 1}, {word}")
    lesson.check(
        " and ".join(found) or "nowhere", found == [f"columns {H} to {2 * H - 1}, transposed"]
    )


def back(lesson: form.Lesson, parameters: dict[str, Tensor], theirs: Path, folder: Path) -> None:
    lesson.predict(
        "Imported again: how many of the tensors are equal to the last bit?", "equal tensors"
    )
    huggingface.import_folder(theirs, folder)
    again = {name: torch.empty_like(p) for name, p in parameters.items()}
    checkpoint.read(folder, again)
    equal = sum(torch.equal(p, again[name]) for name, p in parameters.items())
    lesson.check(
        f"{equal} of {len(parameters)}: nothing is computed", equal == len(parameters), [equal]
    )


def sizes(lesson: form.Lesson, parameters: dict[str, Tensor], ours: Path, folder: Path) -> None:
    count = sum(p.numel() for p in parameters.values())
    lesson.predict(
        f"{count:,} parameters: bytes of numbers in an export with --dtype bf16?", "bytes"
    )
    huggingface.export_folder(ours, folder, "bf16")
    tensors = load_file(folder / "model.safetensors").values()
    stored = sum(x.nbytes for x in tensors)
    lesson.check(f"{stored:,}, 2 for each", stored == 2 * count, [stored])


def logits(lesson: form.Lesson, model, folder: Path) -> None:
    if not importlib.util.find_spec("transformers"):
        lesson.say("transformers is not installed: nothing to compare logits with")
        return
    import transformers

    lesson.predict("transformers loads their folder. By how much do its logits differ from ours?")
    transformers.utils.logging.disable_progress_bar()
    tokens, _ = demo.random_tokens(4, 32, V)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        worst = (model(tokens) - expected).abs().max()
    lesson.check(
        f"by {worst:.1e} at most, of {expected.abs().max():.2f}; rounding is below 1e-5",
        worst.item() < 1e-5,
    )


if __name__ == "__main__":
    form.run("huggingface")
