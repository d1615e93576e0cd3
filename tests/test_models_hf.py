"""BERT, RoBERTa, T5 and mT5 beside transformers: logits, gradients, folders there and back.

The sequences of one batch there are packed into fewer rows here, with their documents.
"""

import ast
import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from small_run import equal, tensors_of
from their_models import shaken
from torch.nn.utils.rnn import pad_sequence

import generate
import models.huggingface
import train
from course.parity import relative
from inference import export, huggingface
from inference.architectures import HuggingFaceError
from inference.hf_config import to_model_config
from inference.huggingface import export_folder, import_folder, untrained, write_checkpoint
from inference.loading import load_model
from models.batch import Context
from models.bert import BertConfig
from models.presets import BERT_PRESETS, T5_PRESETS
from models.runs import BertRun
from models.special_tokens import bert_tokens, t5_tokens
from models.t5 import T5Config
from run.checkpoint import CheckpointError
from run.checkpoint_index import fixed_fields
from run.tokenizer import ByteTokenizer, FileTokenizer

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

V = 61
ODD = random.Random(57)


def bert(**fields) -> dict:
    a, d = ODD.choice((3, 5)), ODD.choice((7, 9, 11))
    shape = dict(num_attention_heads=a, hidden_size=a * d, intermediate_size=ODD.randrange(20, 60))
    shape |= dict(num_hidden_layers=ODD.randrange(1, 3), vocab_size=V, max_position_embeddings=43)
    # without dropout also in training, where transformers computes gradients
    shape |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return shape | fields


def t5(**fields) -> dict:
    """With so few buckets that most distances share the last ones."""
    shape = dict(num_heads=ODD.choice((3, 5)), d_kv=ODD.choice((5, 8, 9)), d_model=29)
    shape |= dict(d_ff=ODD.randrange(20, 60), vocab_size=V, dropout_rate=0.0)
    shape |= dict(num_layers=ODD.randrange(1, 4), num_decoder_layers=ODD.randrange(1, 4))
    shape |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=13)
    # smaller weights than usual: attention that is not all on one token
    shape |= dict(initializer_factor=0.3)
    return shape | fields


V1_1 = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
# model -> (class of transformers, fields of its configuration)
MODELS = {
    "bert": ("BertForMaskedLM", bert()),
    "bert, tanh": ("BertForMaskedLM", bert(hidden_act="gelu_new", type_vocab_size=3)),
    "roberta": ("RobertaForMaskedLM", bert(type_vocab_size=1)),
    "t5": ("T5ForConditionalGeneration", t5()),
    "t5, gated": ("T5ForConditionalGeneration", t5(feed_forward_proj="gated-gelu")),
    "t5 1.1": ("T5ForConditionalGeneration", t5(**V1_1)),
    "mt5": ("MT5ForConditionalGeneration", t5()),
}
every_model = pytest.mark.parametrize("name", MODELS)
# Of each sequence: the text of a BERT, or the source of a T5; the target of a T5.
LENGTHS = ((19, 12), (22, 7), (31, 17))
SEED = torch.Generator().manual_seed(1)
# not 0 and 1, tokens for padding: transformers leaves out gradients of their embedding
TEXTS, TARGETS, LABELS, DECODED = (
    [torch.randint(2, V, (n[part],), generator=SEED) for n in LENGTHS] for part in (0, 1, 0, 1)
)


def class_of(name: str):
    return getattr(transformers, MODELS[name][0])


def theirs(name: str):
    """A model of transformers, with norms and biases away from 1 and 0."""
    model_class, fields = class_of(name), MODELS[name][1]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    if name in ("t5 1.1", "mt5"):
        model.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn_like(model.lm_head.weight))
    if name == "roberta":
        # rows that are not read
        model.roberta.embeddings.position_embeddings.weight.data[:2] = 0
    return shaken(model, but="roberta.embeddings.position").eval()


def is_t5(name: str) -> bool:
    return "t5" in name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder of transformers, and the checkpoint that we made of it, for each model."""
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        theirs(name).save_pretrained(folder / name / "hf", max_shard_size="20KB")
        import_folder(folder / name / "hf", folder / name / "ours")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return lambda name: Path(shutil.copytree(saved / name / "hf", tmp_path / "hf"))


def shape_class(name: str) -> type:
    return T5Config if is_t5(name) else BertConfig


def our_model(path: Path, name: str, **fields):
    """The model of a checkpoint, with other fields of its configuration."""
    model, _ = load_model(path, shape_class=shape_class(name))
    other = dataclasses.replace(model.config, dropout=0.0, **fields).build()
    other.load_state_dict(model.state_dict())
    return other


# --- the same numbers -----------------------------------------------------------------------------


def types_of(name: str) -> list[torch.Tensor]:
    """The type of each token: the first five are another text than the others."""
    types = MODELS[name][1].get("type_vocab_size", 2)
    return [(torch.arange(len(text)) >= 5) * (types - 1) for text in TEXTS]


def their_logits(model, name: str) -> list[torch.Tensor]:
    """Of each sequence; all are padded to one length."""
    padded = pad_sequence(TEXTS, batch_first=True, padding_value=model.config.pad_token_id)
    inputs = dict(input_ids=padded, attention_mask=(padded != model.config.pad_token_id).long())
    if is_t5(name):
        inputs["decoder_input_ids"] = pad_sequence(TARGETS, batch_first=True)
    else:
        inputs["token_type_ids"] = pad_sequence(types_of(name), batch_first=True)
    lengths = map(len, TARGETS if is_t5(name) else TEXTS)
    return [row[:n] for row, n in zip(model(**inputs).logits, lengths)]


def packed(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, documents): parts 0 and 1 in the first row, and part 2 and padding in the second."""
    rows = [torch.cat(parts[:2]), parts[2]]
    documents = [torch.tensor([0] * len(parts[0]) + [1] * len(parts[1])), 0 * parts[2]]
    return pad_sequence(rows, True), pad_sequence(documents, True, padding_value=1)


def our_logits(model, name: str) -> list[torch.Tensor]:
    """Of each sequence; two are packed into one row, and the third one is padded."""
    rows, documents = packed(TEXTS)
    if is_t5(name):
        targets, of_targets = packed(TARGETS)
        context = Context(rows.shape[1], documents=torch.cat((documents, of_targets), 1))
        logits, parts = model(torch.cat((rows, targets), 1), None, context), TARGETS
    else:
        types, _ = packed(types_of(name))
        logits, parts = model(rows, None, Context(documents=documents, types=types)), TEXTS
    first, second, third = map(len, parts)
    return [logits[0, :first], logits[0, first : first + second], logits[1, :third]]


def numbers(logits: list[torch.Tensor], name: str) -> torch.Tensor:
    """Runs backward from the summed loss. Returns all logits."""
    labels = torch.cat(DECODED if is_t5(name) else LABELS)
    logits = torch.cat(logits)
    F.cross_entropy(logits, labels, reduction="sum").backward()
    return logits.detach()


@every_model
def test_logits_and_gradients(name, saved, tmp_path):
    """1e-5 in float32, of every logit and every gradient, with both attentions."""
    model = theirs(name)
    expected = {"logits": numbers(their_logits(model, name), name)}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    # the gradients under our names: saved and imported as if they were weights
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    gradients = tensors_of(tmp_path / "ours")
    expected |= {n.replace("model.", "gradient of ", 1): g for n, g in gradients.items()}
    for attention in ("explicit", "fused"):
        other = our_model(saved / name / "ours", name, attention=attention)
        got = {"logits": numbers(our_logits(other, name), name)}
        got |= {f"gradient of {n}": p.grad for n, p in other.named_parameters()}
        assert got.keys() == expected.keys()
        worst = {label: apart.max().item() for label, apart in relative(got, expected)}
        assert max(worst.values()) < 1e-5, (attention, max(worst, key=worst.get), worst)


SWAPS = {
    "query and key": ("bert", "blocks.*.attention.query", "blocks.*.attention.key"),
    "the norms": ("bert", "blocks.*.attention_norm", "blocks.*.mlp_norm"),
    "gate and up": ("t5 1.1", "encoder.*.mlp.gate", "encoder.*.mlp.up"),
    "norms of the decoder": ("mt5", "decoder.*.attention_norm", "decoder.*.cross_norm"),
    "cross attention": ("t5", "decoder.*.attention.key", "decoder.*.attention.value"),
    "last norms": ("t5", "encoder.*.last_norm", "decoder.*.last_norm"),
}


@pytest.mark.parametrize("mistake", SWAPS)
def test_a_wrong_table_shows(saved, tmp_path, monkeypatch, mistake):
    name, first, second = SWAPS[mistake]
    table = next(a for a in models.huggingface.ARCHITECTURES if a.name == MODELS[name][0]).modules
    locations = table[first], table[second]
    monkeypatch.setitem(table, first, locations[1])
    monkeypatch.setitem(table, second, locations[0])
    import_folder(saved / name / "hf", tmp_path / "ours")
    with torch.no_grad():
        got = torch.cat(our_logits(our_model(tmp_path / "ours", name), name))
        expected = torch.cat(their_logits(theirs(name), name))
    assert (got - expected).abs().max() > 1e-3 * expected.abs().max()


# --- there and back -------------------------------------------------------------------------------


@every_model
def test_there_and_back(name, saved, tmp_path):
    """What we export loads in transformers without a word, bit for bit; imported and exported again
    it is the same folder."""
    export_folder(saved / name / "ours", tmp_path / "a")
    # an mT5 is a T5 1.1
    model_class = class_of(name if name != "mt5" else "t5")
    loaded, report = model_class.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values()), report
    assert equal(loaded.state_dict(), theirs(name).state_dict())
    assert isinstance(loaded, getattr(transformers, loaded.config.architectures[0]))
    with torch.no_grad():
        pairs = zip(their_logits(loaded, name), their_logits(theirs(name), name))
        assert all(a.equal(b) for a, b in pairs)
    config = import_folder(tmp_path / "a", tmp_path / "b")
    assert config == load_model(saved / name / "ours", shape_class=shape_class(name))[0].config
    assert equal(tensors_of(tmp_path / "b"), tensors_of(saved / name / "ours"))
    export_folder(tmp_path / "b", tmp_path / "c")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


def rewrite(folder: Path, change) -> None:
    """One file with the tensors change(tensors) of a folder."""
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})


def older_bert(tensors: dict) -> dict:
    """The first published files: other names, what is no parameter of ours, and copies."""
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    named = {}
    for name, tensor in tensors.items():
        end = ".".join(name.split(".")[-2:])
        named[name.removesuffix(end) + ends.get(end, end)] = tensor
    return named | {
        "bert.embeddings.position_ids": torch.arange(43)[None],
        "bert.pooler.dense.weight": torch.ones(3, 3),
        "cls.seq_relationship.bias": torch.ones(2),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }


def older_t5(tensors: dict) -> dict:
    """Copies of the embedding alone, and a table that was never read."""
    shared = tensors.pop("shared.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    return tensors | {name: shared.clone() for name in copies} | {unread: torch.ones(8, 1)}


OLDER = {"bert": older_bert, "t5": older_t5, "t5 1.1": older_t5}


@pytest.mark.parametrize("name", OLDER)
def test_older_files(name, copy, saved, tmp_path):
    folder = copy(name)
    rewrite(folder, OLDER[name])
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if name == "t5 1.1":
        # as transformers 4 wrote it
        del config["scale_decoder_outputs"]
        config["tie_word_embeddings"] = False
    file.write_text(json.dumps(config))
    import_folder(folder, tmp_path / "ckpt")
    assert equal(tensors_of(tmp_path / "ckpt"), tensors_of(saved / name / "ours"))


PUBLISHED = [
    ("bert-base", "BertForMaskedLM", {}),
    (
        "roberta-base",
        "RobertaForMaskedLM",
        dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5),
    ),
    ("t5-small", "T5ForConditionalGeneration", {}),
    ("mt5-small", "MT5ForConditionalGeneration", {}),
]


@pytest.mark.parametrize("preset, name, fields", PUBLISHED)
def test_presets_are_the_published_shapes(preset, name, fields):
    """What transformers has by default, but for RoBERTa, is the first published model."""
    theirs = getattr(transformers, name).config_class(**fields).to_dict()
    ours, _ = (BERT_PRESETS | T5_PRESETS)[preset]
    expected = T5Config(**ours) if "T5" in name else BertConfig(**ours)
    got = to_model_config(theirs | {"architectures": [name]})
    assert fixed_fields(got) == fixed_fields(expected) and got.dropout == expected.dropout


# --- refusals -------------------------------------------------------------------------------------

# model, changes of its config.json, and words of the refusal, with ".." between them
REFUSED = [
    ("bert", {"hidden_act": "relu"}, 'hidden_act is "relu" .. "gelu" or "gelu_new"'),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is"),
    ("bert", {"is_decoder": True}, "is_decoder is true"),
    ("bert", {"add_cross_attention": True}, "add_cross_attention is true"),
    ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ("bert", {"type_vocab_size": 0}, "type_vocab_size 0"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id is 0 .. only 1"),
    ("roberta", {"hidden_act": "gelu_new"}, 'hidden_act is "gelu_new" .. "gelu"'),
    ("roberta", {"type_vocab_size": 2}, "type_vocab_size is 2 .. only 1"),
    ("roberta", {"max_position_embeddings": 2}, "seq_length 0"),
    (
        "t5",
        {"feed_forward_proj": "gated-silu"},
        'feed_forward_proj is "gated-silu" .. "gated-gelu"',
    ),
    ("t5", {"dense_act_fn": "gelu_new"}, 'dense_act_fn is "gelu_new" .. activation is relu'),
    ("t5", {"is_gated_act": True}, "is_gated_act is true .. activation is relu"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder is false"),
    ("t5", {"decoder_start_token_id": 7}, "decoder_start_token_id is 7 .. padding token, 0"),
    ("t5", {"pad_token_id": 3, "decoder_start_token_id": 0}, "decoder_start_token_id is 0 .. 3"),
    ("t5", {"num_decoder_layers": 0}, "num_decoder_layers is 0"),
    ("t5", {"relative_attention_num_buckets": 6}, "buckets 6: must be a multiple of 4"),
    ("t5", {"num_layers": 0}, "num_layers is 0"),
    ("t5", {"num_layers": "2"}, 'num_layers is "2"'),
    ("t5", {"scale_decoder_outputs": None}, "scale_decoder_outputs is null"),
]


def change(folder: Path, changes: dict) -> dict:
    """Of config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("name, changes, words", REFUSED)
def test_what_is_not_computed(name, changes, words, saved):
    config = json.loads((saved / name / "hf" / "config.json").read_text())
    to_model_config(config)
    with pytest.raises(HuggingFaceError) as refused:
        to_model_config(config | changes)
    assert all(word in str(refused.value) for word in words.split(" .. "))


SHARED = "encoder.embed_tokens.weight"
TENSORS = [
    (
        "t5",
        lambda t: t | {SHARED: t["shared.weight"] + 1},
        "embed_tokens.weight differs from shared",
    ),
    (
        "mt5",
        lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"},
        "lm_head.weight is miss",
    ),
    (
        "roberta",
        lambda t: t | {"lm_head.decoder.bias": t["lm_head.bias"] + 1},
        "differs from lm_head",
    ),
    ("t5", lambda t: {n: x for n, x in t.items() if "decoder.block.0." not in n}, "num_layers "),
]


@pytest.mark.parametrize("name, change, words", TENSORS)
def test_tensors_that_do_not_fit(name, change, words, copy, tmp_path):
    folder = copy(name)
    rewrite(folder, change)
    with pytest.raises(HuggingFaceError, match=words):
        import_folder(folder, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_commands_of_decoders_refuse_them(saved, capsys):
    """Also as folders of Hugging Face."""
    for path in (saved / "t5" / "ours", saved / "bert" / "hf"):
        argv = ["--checkpoint", str(path), "--prompt", "a", "--device", "cpu"]
        assert generate.main(argv) == 2
        assert "and this command needs one of train.py" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"of -m models.t5, and .* one of -m models.bert"):
        load_model(saved / "t5" / "ours", shape_class=BertConfig)


def test_only_folders_of_these_models_load_models():
    """No file of inference/ imports models/ at its beginning."""
    for path in Path(huggingface.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            assert not (isinstance(node, ast.ImportFrom) and node.module.startswith("models"))


# --- ONNX -----------------------------------------------------------------------------------------


def test_onnx(copy, saved, tmp_path, capsys):
    """Of a BERT from a folder of Hugging Face: the logits of transformers."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    folder = copy("bert")
    write_tokenizer(folder, ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])
    assert export.main([str(folder), str(tmp_path / "graph")]) == 0
    assert "logits within" in capsys.readouterr().out
    session = export.Session(tmp_path / "graph").session
    for text, types, expected in zip(TEXTS, types_of("bert"), their_logits(theirs("bert"), "bert")):
        feed = dict(tokens=text, types=types, real=torch.ones_like(text))
        (logits,) = session.run(None, {name: x[None].numpy() for name, x in feed.items()})
        apart = (torch.from_numpy(logits[0]) - expected).abs().max()
        assert apart < 1e-5 * expected.abs().max()
    for argv, words in (
        (["run", str(tmp_path / "graph"), "--prompt", "a"], "a BERT, which has logits"),
        (
            [str(saved / "t5" / "hf"), str(tmp_path / "t5")],
            "a model of -m models.t5: no graph is made of one",
        ),
    ):
        assert export.main(argv) == 2
        assert words in capsys.readouterr().err


# --- tokenizers -----------------------------------------------------------------------------------


def write_tokenizer(folder: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))


# model, its vocabulary, and the ids of padding, begin and end
TOKENIZERS = [
    ("bert", ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b"], (0, 1, 2)),
    ("roberta", ["<s>", "<pad>", "</s>", "<mask>", "a", "b"], (1, 0, 2)),
    ("t5 1.1", ["<pad>", "</s>", "<unk>", "<extra_id_0>", "a", "b"], (0, None, 1)),
]


@pytest.mark.parametrize("name, words, ids", TOKENIZERS)
def test_tokenizers_go_with_the_model(name, words, ids, copy, tmp_path):
    folder = copy(name)
    write_tokenizer(folder, words)
    assert huggingface.main(["import", str(folder), str(tmp_path / "ckpt")]) == 0
    assert huggingface.main(["export", str(tmp_path / "ckpt"), str(tmp_path / "back")]) == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    fields = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert tuple(config.get(field) for field in fields) == ids
    assert is_t5(name) == (config.get("decoder_start_token_id") == ids[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer.encode("b a", add_special_tokens=False) == [5, 4]


def test_an_adapter_is_merged_into_an_export(copy, tmp_path):
    """W + α/r B A, in the places of transformers; what the adapter does not change stays."""
    folder, base, run = copy("bert"), tmp_path / "ckpt", tmp_path / "run"
    write_tokenizer(folder, ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "▁a", "▁b"])
    import_folder(folder, base)
    (tmp_path / "a.txt").write_text("▁a ▁b " * 900)
    words = f"--load {base} --data {tmp_path}/a.txt --cache {tmp_path}/cache --out {run} --lr 1"
    words += " --steps 2 --global-batch-size 2 --eval-every 0 --device cpu --peft lora"
    assert train.main(f"{words} --lora-rank 2 --lora-alpha 6".split(), BertRun) == 0
    assert huggingface.main(["export", str(base), str(tmp_path / "b"), "--adapter", str(run)]) == 0
    before, after = tensors_of(base), class_of("bert").from_pretrained(tmp_path / "b").state_dict()
    adapter, module = tensors_of(run), "model.blocks.0.attention.query"
    a, b = (adapter[f"{module}.lora.{part}"] for part in "ab")
    assert b.abs().max() > 0.01
    layer = "bert.encoder.layer.0.attention"
    merged = before[f"{module}.weight"] + 3 * b @ a
    torch.testing.assert_close(after[f"{layer}.self.query.weight"], merged)
    norm = before["model.blocks.0.attention_norm.weight"]
    assert after[f"{layer}.output.LayerNorm.weight"].equal(norm)


def test_a_roberta_needs_its_padding_token(copy, tmp_path):
    folder = copy("roberta")
    write_tokenizer(folder, ["<pad>", "<s>", "</s>", "<mask>", "a", "b"])
    import_folder(folder, tmp_path / "ckpt")
    with pytest.raises(
        HuggingFaceError, match=r"padding token .* is 0, .*: train a BERT, as --model bert-base"
    ):
        export_folder(tmp_path / "ckpt", tmp_path / "back")


def test_special_tokens_of_bytes(tmp_path):
    """transformers has the ids of this project, in and out of the folder."""
    bert_ids, t5_ids = bert_tokens(ByteTokenizer()), t5_tokens(ByteTokenizer())
    for name, ids in (("bert", bert_ids), ("t5", t5_ids)):
        config = shape_class(name)(2, 16, 2, vocab_size=ids.vocab_size)
        state = untrained({"tokenizer": "bytes"}, dataclasses.asdict(config))
        read = config.build().get_parameter
        write_checkpoint(tmp_path / f"{name} of bytes", config, state, read)
        export_folder(tmp_path / f"{name} of bytes", tmp_path / name)
    load = transformers.AutoTokenizer.from_pretrained
    theirs = load(tmp_path / "bert")
    cls, sep = theirs.cls_token_id, theirs.sep_token_id
    assert (sep, cls, theirs.mask_token_id, theirs.pad_token_id, len(theirs)) == bert_ids
    pair = theirs("é [MASK]", "b")
    assert pair["input_ids"] == [cls, *"é ".encode(), theirs.mask_token_id, sep, *b"b", sep]
    assert pair["token_type_ids"] == [0, 0, 0, 0, 0, 0, 1, 1]
    theirs = load(tmp_path / "t5")
    text = theirs("<extra_id_7>a<extra_id_99>")
    assert text["input_ids"] == [t5_ids.sentinels[7], *b"a", t5_ids.sentinels[99], t5_ids.eos]
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (t5_ids.eos, t5_ids.pad, 358)
    assert "token_type_ids" not in text
    for name, tokens_of, ids in (("bert", bert_tokens, bert_ids), ("t5", t5_tokens, t5_ids)):
        import_folder(tmp_path / name, tmp_path / f"back {name}")
        assert tokens_of(FileTokenizer(str(tmp_path / f"back {name}" / "tokenizer.json"))) == ids
