"""The lesson of inference/export.py: one graph for prefill and decode, traced once."""

import importlib.util
import tempfile
from pathlib import Path

import numpy as np
import torch

import generate
from course import demo, form
from inference import export

LENGTHS = (2, 9, 5)
NEW = 6
SEQ_LENGTH = 32

WITHOUT = form.Removals()


@WITHOUT.replace(
    "sizes", torch.onnx, "export", "Nobody says which sizes change. What is in the graph?"
)
def traced_with_constants(*args, dynamic_shapes=None, original=torch.onnx.export, **options):
    """The sizes of the tensors that it was traced with: 2 sequences, 3 tokens after 4. It runs with
    no others, so it has no prefill."""
    return original(*args, **options)


@WITHOUT.replace(
    "padding",
    export.Session,
    "begin",
    "Padding stands at position 0. Which prompts get other tokens?",
)
def padding_at_0(self, prompts, original=export.Session.begin):
    """The shorter ones: position 0 is not after their own, so they see padding as a token. The
    longest prompt has none, and a prompt by itself has none."""
    tokens, positions = original(self, prompts)
    return tokens, np.where(positions == self.seq_length, 0, positions)


def make_model() -> torch.nn.Module:
    """A Llama with random weights, float32, in which a token's neighbours count."""
    config = demo.tiny_config(num_layers=1, llama=True, num_kv_heads=2, seq_length=SEQ_LENGTH)
    model = demo.make_model(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def teach(lesson: form.Lesson) -> None:
    if not all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        lesson.say("pip install onnx onnxscript onnxruntime: this lesson runs a graph")
        return
    model = make_model()
    with tempfile.TemporaryDirectory() as folder, lesson.removed():
        export.trace(model, "bytes").save(Path(folder) / "model.onnx", external_data=True)
        session = export.Session(folder)
        sizes(lesson, session)
        try:
            same_tokens(lesson, model, session)
            pieces(lesson, model, session)
        # onnxruntime raises it where sizes are constants.
        except Exception as e:
            lesson.check(f"onnxruntime ends with {type(e).__name__}", False)


def sizes(lesson: form.Lesson, session: export.Session) -> None:
    lesson.predict(
        "4 heads of 16, 2 of them for keys. The graph was traced with 2 sequences, 3 tokens after a"
        " cache of 4. Which sizes of the keys are symbols in it?"
    )
    nodes = [*session.session.get_inputs(), *session.session.get_outputs()]
    shapes = {node.name: node.shape for node in nodes}
    past, present = shapes["past.0.key"], shapes["present.0.key"]
    lesson.check(
        f"batch and past: {past} comes in, and {present} goes out", past == ["batch", 2, "past", 16]
    )


def same_tokens(lesson: form.Lesson, model, session: export.Session) -> None:
    lesson.predict(
        f"Three prompts of {', '.join(map(str, LENGTHS))} tokens, in one batch. How many of"
        f" {3 * NEW} greedy tokens are generate.py's?",
        "tokens",
    )
    prompts = [list(range(1, n + 1)) for n in LENGTHS]
    expected = generate.generate(model, prompts, NEW, temperature=0)
    tokens = session.generate(prompts, NEW)
    equal = sum(a == b for x, y in zip(tokens, expected) for a, b in zip(x, y))
    columns = session.past["past.positions"].shape[1]
    lesson.check(
        f"{equal}, with a cache of {columns} columns: {max(LENGTHS)} and {NEW - 1} tokens were"
        " read, the last one is not",
        equal == 3 * NEW and columns == max(LENGTHS) + NEW - 1,
        [equal],
    )


def pieces(lesson: form.Lesson, model, session: export.Session) -> None:
    lesson.predict("A prompt of 9 tokens is read as 4, then 5 after a cache of 4. Other logits?")
    prompt = list(range(1, 10))
    tokens, positions = session.begin([prompt])
    session.forward(tokens[:, :4], positions[:, :4])
    logits = session.forward(tokens[:, 4:], positions[:, 4:])
    with torch.no_grad():
        expected = model(torch.tensor([prompt]))[:, -1]
    worst = demo.difference(expected, torch.from_numpy(logits))
    lesson.check(
        f"by {worst:.0e} of the largest: prefill and decode are two cases of this", worst < 1e-5
    )


if __name__ == "__main__":
    form.run("export")
