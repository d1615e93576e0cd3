"""export.py: graphs in onnxruntime beside generate.py and beside the plain model.

Tracing a layer takes a second, so a graph serves all tests of its family.
"""

import importlib.util
import shutil
from functools import cache

import numpy as np
import pytest
import test_families
import torch
from test_generate import save
from their_models import shaken, their_model

import generate
import sharding
from base.model_config import MoEConfig
from course import demo
from inference import export, huggingface

LLAMA = dict(llama=True, num_kv_heads=2)
LLAMA_3_ANGLES = dict(rotary_factor=8.0, rotary_original_length=16)
BLOOM = dict(positions="alibi", embedding_norm=True)
GEMMA = dict(norm="rmsnorm1p", activation="geglu", embedding_scale=True)
FAMILIES = {
    "gpt2": dict(num_layers=1),
    # BLOOM, but untied; 6 heads have slopes between those of 4
    "alibi": dict(**BLOOM, num_layers=1, hidden_size=48, num_heads=6, tied=False),
    # Llama 3's angles, Mistral's window, Qwen's biases and norms, Gemma's activation, norms, scale
    "all of Llama": dict(
        **LLAMA,
        **GEMMA,
        **LLAMA_3_ANGLES,
        head_dim=24,
        sliding_window=5,
        window_pattern="10",
        attention_bias="qkv",
        qk_norm=True,
        tied=True,
    ),
}
MORE_FAMILIES = {
    "llama": LLAMA,
    "llama 3": dict(**LLAMA, **LLAMA_3_ANGLES, tied=True),
    "mistral": dict(**LLAMA, sliding_window=4),
    "a window of one token": dict(**LLAMA, sliding_window=1),
    "qwen 2": dict(**LLAMA, attention_bias="qkv"),
    "qwen 3": dict(**LLAMA, qk_norm=True, head_dim=32),
    "gemma": dict(**GEMMA, llama=True, num_kv_heads=1, tied=True),
    "alibi with a window": dict(positions="alibi", sliding_window=6),
    "explicit attention": dict(attention="explicit"),
    "falcon": dict(positions="rotary", parallel_block=True, activation="exact-gelu"),
    "nemotron": dict(
        llama=True, norm="layernorm1p", activation="squared-relu", head_dim=16, rotary_share=0.5
    ),
}
ALL = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.repetition) for name in MORE_FAMILIES)]
every_family = pytest.mark.parametrize("family", ALL)
PROMPTS = [list(range(1, n + 1)) for n in (3, 14, 1, 8)]
# the longest prompt reaches the end of a context of 32
NEW = 19


@pytest.fixture(autouse=True, scope="module")
def _packages():
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)


def make_model(family: str) -> torch.nn.Module:
    """float32, far from its initial values: norms, biases and positions count, and greedy tokens
    change."""
    config = demo.tiny_config(MoEConfig, **(FAMILIES | MORE_FAMILIES)[family])
    model = demo.meta_model(config)
    sharding.init(model, 0, "cpu", torch.float32)
    # with a large embedding, a tied model repeats the prompt
    return shaken(model, but="embedding.tokens").requires_grad_(False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(family): (model, folder of its graph), as the command writes it."""

    @cache
    def export_family(family: str):
        folder = tmp_path_factory.mktemp("export")
        model = make_model(family)
        save(folder / "model", model)
        assert export.main([str(folder / "model"), str(folder / "graph")]) == 0
        return model, folder / "graph"

    return export_family


@pytest.fixture(scope="module")
def traced(exported):
    """traced(family): (model, session)"""

    @cache
    def open_family(family: str):
        model, folder = exported(family)
        return model, export.Session(folder)

    return open_family


def worst(logits, expected) -> float:
    return np.abs(logits - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max()


@every_family
def test_greedy_tokens(traced, family):
    """Those of generate.py, up to the end of the context, together and alone; logits within
    1e-5."""
    model, session = traced(family)
    expected = generate.generate(model, PROMPTS, NEW, temperature=0)
    assert session.generate(PROMPTS, NEW) == expected
    for prompt, ids in zip(PROMPTS, expected):
        assert session.generate([prompt], NEW) == [ids]
    assert len({token for ids in expected for token in ids}) > 4
    difference, text = export.compare(model, session)
    assert difference < 1e-5 and text.startswith("24 of 24 ")


@every_family
def test_pieces(traced, family):
    """A text in pieces of any length has the logits of the plain model, without a cache."""
    model, session = traced(family)
    texts = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(1))
    tokens, positions = session.begin(texts.tolist())
    at = 0
    for length in (1, 7, 2, 1, 21):
        piece = slice(at, at + length)
        logits = session.forward(tokens[:, piece], positions[:, piece])
        at += length
        assert worst(logits, model(texts[:, :at])[:, -1]) < 1e-5


@every_family
def test_cache(traced, family):
    """Its columns, and what a window leaves of them."""
    _, session = traced(family)
    session.generate(PROMPTS[:2], 5)
    columns = 14 + 4
    window = session.window
    if window:
        columns = min(columns, window - 1)
    assert session.past["past.positions"].shape == (2, columns)
    assert {x.shape[2] for name, x in session.past.items() if name[-1] != "s"} == {columns}


def test_stops(traced):
    """At a stop id, which is no part of the text, and at the end of the context."""
    model, session = traced("gpt2")
    free = session.generate(PROMPTS, NEW)
    stop = free[0][3]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert cut != free
    assert session.generate(PROMPTS, NEW, (stop,)) == cut
    assert generate.generate(model, PROMPTS, NEW, temperature=0, eot=stop) == cut
    full = session.generate([list(range(30)), [1]], 100)
    assert list(map(len, full)) == [3, 32]
    assert session.generate(PROMPTS, 0) == [[], [], [], []]


# --- the models of transformers ------------------------------------------------------------------

THEIRS = {name: case for name, case in test_families.FAMILIES.items() if name != "mixtral"}


@pytest.mark.repetition
@pytest.mark.parametrize("family", THEIRS)
def test_transformers(family, tmp_path):
    """Their folder in onnxruntime: their logits, and the greedy tokens of their `generate`."""
    tokens = dict(vocab_size=257, bos_token_id=256, eos_token_id=256, pad_token_id=None)
    model_type, fields = THEIRS[family]
    theirs = shaken(their_model(model_type, **fields | tokens), but="embed|wte")
    theirs.save_pretrained(tmp_path / "theirs")
    assert export.main([str(tmp_path / "theirs"), str(tmp_path / "graph")]) == 0
    session = export.Session(tmp_path / "graph")
    for prompt, ids in zip(PROMPTS, session.generate(PROMPTS, 12)):
        tokens = torch.tensor([prompt])
        options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        text = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0]
        assert ids == text[len(prompt) :].tolist()
        logits = session.forward(*session.begin([prompt]))
        assert worst(logits, theirs(tokens).logits[:, -1].detach()) < 1e-5


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def graph(exported):
    return exported("gpt2")[1]


def test_command(graph, capsys):
    """The files, and generate.py's text from onnxruntime."""
    names = {path.name for path in graph.iterdir()}
    assert names == {"model.onnx", "model.onnx.data"}
    argv = ["run", str(graph), "--prompt", "def ", "--max-tokens", "12"]
    assert export.main(argv) == 0
    done = capsys.readouterr()
    model = make_model("gpt2")
    new = generate.generate(model, [list(b"def ")], 12, temperature=0, eot=256)[0]
    assert done.out == "def " + bytes(new).decode(errors="replace") + "\n"
    assert done.err.startswith(f"{len(new)} tokens, ")


def test_weights_are_there_once(graph):
    """4 bytes for each parameter of a tied model, in one file; norms are in the other one."""
    count = sharding.num_parameters(make_model("gpt2"))
    size = (graph / "model.onnx.data").stat().st_size
    assert 0.97 * 4 * count < size <= 4 * count


def test_half_precision_and_a_tokenizer(tmp_path, capsys):
    """Of a Hugging Face folder: half the bytes, and its tokenizer comes along."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    save(tmp_path / "ours", make_model("gpt2"))
    huggingface.export_folder(tmp_path / "ours", tmp_path / "hf")
    words = {f"w{n}": n for n in range(250)} | {"[UNK]": 250, "</s>": 251}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    # of the tokenizer that was there
    (tmp_path / "hf" / "tokenizer_config.json").unlink()
    argv = [str(tmp_path / "hf"), str(tmp_path / "graph"), "--dtype", "fp16"]
    assert export.main(argv) == 0
    file = tmp_path / "graph" / "model.onnx.data"
    size = 2 * sharding.num_parameters(make_model("gpt2"))
    assert 0.95 * size < file.stat().st_size <= size
    session = export.Session(tmp_path / "graph")
    assert session.session.get_inputs()[3].type == "tensor(float16)"
    capsys.readouterr()
    argv = ["run", str(tmp_path / "graph"), "--prompt", "w1 w2", "--max-tokens", "5"]
    assert export.main(argv) == 0
    assert capsys.readouterr().out.startswith("w1 w2")


def refused(argv, capsys) -> str:
    assert export.main([str(word) for word in argv]) == 2
    done = capsys.readouterr()
    assert not done.out and done.err.count("\n") == 1
    return done.err


def test_refusals(graph, tmp_path, capsys, monkeypatch):
    """One line, which names what would fit; nothing is left in the target."""
    target = tmp_path / "graph"
    assert "none: no such folder" in refused([tmp_path / "none", target], capsys)
    assert "has no model.onnx" in refused(["run", tmp_path, "--prompt", "a"], capsys)
    assert "--prompt: is for" in refused([graph.parent / "model", target, "--prompt", "a"], capsys)
    assert "--prompt TEXT: give" in refused(["run", graph], capsys)
    assert "--dtype: was chosen" in refused(["run", graph, "--dtype", "fp16"], capsys)
    assert "--max-tokens: is for" in refused([graph, target, "--max-tokens", "9"], capsys)
    assert "FOLDER '': names no folder" in refused([graph, ""], capsys)
    assert "and the model's context holds 32" in refused(
        ["run", graph, "--prompt", "a" * 33], capsys
    )
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    assert "cannot be run" in refused(["run", tmp_path, "--prompt", "a"], capsys)
    argv = ["run", graph, "--prompt", "a", "--max-tokens", "-1"]
    assert "--max-tokens -1: must be" in refused(argv, capsys)
    experts = demo.tiny_config(MoEConfig, llama=True, num_experts=2, router="topk", router_topk=1)
    with pytest.raises(export.ExportError, match="num_experts 2: how many tokens"):
        export.check(experts)
    with pytest.raises(export.ExportError, match="seq_length 3: must be at least 4"):
        export.check(demo.tiny_config(seq_length=3))
    found = importlib.util.find_spec
    without = lambda name: None if name == "onnxscript" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert "pip install onnxscript" in refused([graph.parent / "model", target], capsys)
    assert not target.exists()


class Copied:
    """In the place of a program that was traced: the graph in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, path, external_data: bool) -> None:
        for file in self.folder.iterdir():
            shutil.copy(file, path.parent)


@pytest.mark.parametrize("value, words", [(0.5, "beyond 0.0001, so nothing"), (np.nan, "finite")])
def test_a_graph_that_differs_is_not_kept(graph, tmp_path, capsys, monkeypatch, value, words):
    """One weight of the model is another than in the graph."""
    model = make_model("gpt2")
    model.blocks["0"].mlp.down.bias[3] += value
    save(tmp_path / "model", model)
    monkeypatch.setattr(export, "trace", lambda model, name: Copied(graph))
    assert words in refused([tmp_path / "model", tmp_path / "graph"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
