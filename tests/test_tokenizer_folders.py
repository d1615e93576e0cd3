"""Tokenizer, begin and end tokens, generation settings and chat templates go in and out with a
Hugging Face folder: the same ids in transformers before and after, and here."""

import argparse
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import published_tokenizers as published
import pytest
import tokenizers
from test_tokenizer import edit_json, here, run, words  # noqa: F401 (a fixture)
from their_models import their_model

import generate
from finetune.chat import message
from finetune.chat_template import ChatError, ChatTokenizer, of_tokenizer, open_template
from inference import cli, generation_config, huggingface
from inference.loading import find_chat, load_model
from inference.tokenizer_json import CHARACTERS, files_of, merges_of
from run import checkpoint
from run.tokenizer import FileTokenizer, TokenizerError, make_tokenizer, prompt_ids, save_files

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()

# more ids than any of these tokenizers has, as Qwen's embedding has more rows than its tokenizer
VOCAB_SIZE = 400
FIELDS = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
FIELDS |= dict(max_position_embeddings=32, num_key_value_heads=2, head_dim=8)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
QUESTION = [message("user", "hello"), message("assistant", "world"), message("user", "1 + 2?")]
GENERATE = ("--max-tokens", "3", "--device", "cpu", "--kernels", "off")


def write_model(kind: str, folder: Path) -> None:
    """A model as save_pretrained writes it, with the tokenizer of a kind and its ids."""
    model_type = published.KINDS[kind].model_type
    # Mistral as in version 0.3: it has a Llama's tensors
    more = {"mistral": dict(sliding_window=None), "bloom": dict(seq_length=32)}
    fields = FIELDS | more.get(model_type, {})
    their_model(model_type, vocab_size=VOCAB_SIZE, **fields).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokenizer = published.write(kind, folder)
    settings = {}
    if (folder / "generation_config.json").exists():
        settings = read(folder / "generation_config.json")
    ids = {"pad_token_id": None}
    for name in ("bos_token", "eos_token"):
        token = published.KINDS[kind].config[name]
        token = token["content"] if isinstance(token, dict) else token
        number = tokenizer.token_to_id(token) if token else None
        ids[f"{name}_id"] = settings.get(f"{name}_id", number)
    edit_json(folder / "config.json", **ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> (a folder as published, the same imported and exported); made when asked for."""
    made = {}

    def folder_of(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            write_model(kind, place / "hf")
            huggingface.import_folder(place / "hf", place / "ckpt")
            huggingface.export_folder(place / "ckpt", place / "back")
            made[kind] = place
        return made[kind]

    return folder_of


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def texts_for(tokenizer) -> list[str]:
    end = tokenizer.eos_token or "</s>"
    return [text.replace("{end}", end) for text in published.TEXTS]


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", published.KINDS)
def test_transformers_reads_the_same(folders, kind):
    """Ids, with special tokens and without; texts; special tokens; chat templates; settings."""
    place = folders(kind)
    before = transformers.AutoTokenizer.from_pretrained(place / "hf")
    after = transformers.AutoTokenizer.from_pretrained(place / "back")
    assert type(before) is type(after) and len(before) == len(after)
    assert before.special_tokens_map == after.special_tokens_map
    for text in texts_for(before):
        for special in (True, False):
            ids = before(text, add_special_tokens=special)["input_ids"]
            assert after(text, add_special_tokens=special)["input_ids"] == ids, text
            text = before.decode(ids, skip_special_tokens=special)
            assert after.decode(ids, skip_special_tokens=special) == text
    assert before.chat_template == after.chat_template
    if before.chat_template:
        assert after.apply_chat_template(QUESTION) == before.apply_chat_template(QUESTION)
    for name in TOKENIZER_FILES:
        if (kind, name) == ("mistral", "tokenizer_config.json"):
            # exported as a Llama, for which the class in this file would count
            expected = read(place / "hf" / name) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            assert read(place / "back" / name) == expected
            continue
        assert (place / "hf" / name).read_bytes() == (place / "back" / name).read_bytes()
    if (place / "hf" / "generation_config.json").exists():
        load = transformers.GenerationConfig.from_pretrained
        assert load(place / "hf").to_dict() == load(place / "back").to_dict()
    configs = [transformers.AutoConfig.from_pretrained(place / name) for name in ("hf", "back")]
    begins, ends = zip(*((config.bos_token_id, config.eos_token_id) for config in configs))
    assert begins[0] == begins[1]
    assert np.array_equal(np.sort(np.atleast_1d(ends[0])), np.sort(np.atleast_1d(ends[1])))


@pytest.mark.parametrize("kind", published.KINDS)
def test_here_the_ids_are_the_same(folders, kind):
    place = folders(kind)
    ours = FileTokenizer(checkpoint.tokenizer_of(place / "ckpt"))
    # the file as it is; some classes of transformers 5 build their tokenizer anew
    exact = transformers.PreTrainedTokenizerFast.from_pretrained(place / "hf")
    by_class = transformers.AutoTokenizer.from_pretrained(place / "hf")
    differing = []
    for text in texts_for(exact):
        expected = exact(text)["input_ids"]
        if text:
            assert prompt_ids(ours, text) == expected, text
        assert ours.encode(text) == exact(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(expected) == exact.decode(expected, skip_special_tokens=True)
        if by_class(text)["input_ids"] != expected:
            differing.append(text)
    assert exact.eos_token_id == ours.eot
    assert exact.convert_tokens_to_ids(published.ends(kind)) == sorted(ours.stop_ids)
    # what Llama 2's class leaves out of its file: a space before a text that begins with one, and
    # behind a special token
    if type(by_class).__name__ == "LlamaTokenizer":
        assert differing and all(text[:1] in " ▁" or "</s>" in text for text in differing)
    # what GPT-2's class leaves out of SmolLM's file: digits one by one, before words are split
    elif kind == "smollm":
        assert differing == ["  1234"]
        assert by_class.tokenize("  1234") == ["Ġ", "Ġ", "1", "2", "3", "4"]
        assert exact.tokenize("  1234") == ["ĠĠ", "1", "2", "3", "4"]
    else:
        assert not differing


@pytest.mark.parametrize("kind", published.KINDS)
def test_here_a_conversation_is_the_same(folders, kind):
    """The template is found, and rendered as transformers does."""
    place = folders(kind)
    ours = FileTokenizer(checkpoint.tokenizer_of(place / "ckpt"))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(place / "hf")
    if not theirs.chat_template:
        return
    chat = find_chat(place / "ckpt", ours)
    text = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert chat.template.render(QUESTION, ask=True).text == text
    ids = theirs.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert chat.prompt(QUESTION) == ids


def test_further_templates_go_along(folders):
    place = folders("smollm")
    for name, content in published.TEMPLATE_FILES.items():
        for folder in ("ckpt", "back"):
            assert (place / folder / name).read_text() == content
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "back")
    text = tokenizer.apply_chat_template(QUESTION, chat_template="tools", tokenize=False)
    assert text.startswith("T<|im_start|>")


def test_ids_of_the_configuration_are_kept(folders, tmp_path):
    """Those that generation_config.json lacks come from config.json. Without end tokens, and with
    none of a file's own, a begin token still begins a text."""
    hf = Path(shutil.copytree(folders("llama3") / "hf", tmp_path / "hf"))
    published.write_json(hf / "generation_config.json", {"temperature": 0.6})
    huggingface.import_folder(hf, tmp_path / "ckpt")
    ids = read(hf / "config.json")
    settings = {name: ids[name] for name in ("bos_token_id", "eos_token_id")}
    assert read(tmp_path / "ckpt/generation_config.json") == settings | {"temperature": 0.6}
    begin = "<|begin_of_text|>"
    published.byte_level([begin], begin=begin).save(str(hf / "tokenizer.json"))
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (hf / name).unlink()
    edit_json(hf / "config.json", bos_token_id=None, eos_token_id=None)
    huggingface.import_folder(hf, tmp_path / "endless")
    for prompt in ([], ["--prompt", "if a"]):
        assert generate.main(["--checkpoint", str(tmp_path / "endless"), *prompt, *GENERATE]) == 0


def test_a_tokenizer_beyond_the_model_is_refused(folders, tmp_path):
    hf = Path(shutil.copytree(folders("gpt2") / "hf", tmp_path / "hf"))
    words(hf / "tokenizer.json", ["?", *map(str, range(400))])
    for name in TOKENIZER_FILES[1:]:
        (hf / name).unlink()
    message = r"its ids go up to 400, and the model of config\.json has vocab_size"
    with pytest.raises(huggingface.HuggingFaceError, match=message):
        huggingface.import_folder(hf, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


# --- the built-in tokenizers ----------------------------------------------------------------------


# Radford et al. 2019, encoder.py
WORD = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture
def gpt2_encoding(monkeypatch):
    """tiktoken's encoding of GPT-2 with a small vocabulary: the published one needs a network."""
    tiktoken = pytest.importorskip("tiktoken")
    learned = json.loads(published.gpt2([]).to_str())["model"]["vocab"]
    byte_of = {character: byte for byte, character in enumerate(CHARACTERS)}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in learned.items()}
    end = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding("gpt2", pat_str=WORD, mergeable_ranks=ranks, special_tokens=end)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


@pytest.mark.parametrize(
    "model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "bloom"]
)
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_transformers_loads_a_built_in_tokenizer(tmp_path, gpt2_encoding, name, model_type):
    """Whatever the model beside it is, whose class would split a text in its own way."""
    ours = make_tokenizer(name)
    save_files(files_of(ours), tmp_path)
    published.write_json(tmp_path / "config.json", {"model_type": model_type})
    # AutoTokenizer takes Qwen 2's class for every Qwen 2, whatever its files name
    loader = transformers.AutoTokenizer
    if model_type == "qwen2":
        loader = transformers.PreTrainedTokenizerFast
    theirs = loader.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eot, None)
    assert len(theirs) == ours.vocab_size
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.token_to_id("<|endoftext|>") == ours.eot
    texts = [text.replace("{end}", "</s>") for text in published.TEXTS]
    for text in [*texts, *published.TEXT, "\ufffd\ud7ff\ue000\U0010ffff"]:
        ids = [int(i) for i in ours.encode(text)]
        assert theirs(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs("a<|endoftext|>")["input_ids"] == [*ours.encode("a"), ours.eot]
    # bytes that are no UTF-8, and the end token among them
    draws = np.random.default_rng(0).integers(ours.vocab_size, size=(300, 20)).tolist()
    overlong = [[0xC0, 0x80], [0xED, 0xA0, 0x80], [0xF4, 0x90, 0x80, 0x80], [0xE4, 0xBD, 97]]
    for ids in [*draws, *overlong, [0xC3, ours.eot, 0xA9]]:
        if name == "gpt2":
            ids = [i for i in ids if i != ours.eot]
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_a_run_with_bytes_is_exported_with_its_tokenizer(here, capsys):  # noqa: F811
    """And its chat template. Some rows of the embedding are beyond the tokenizer."""
    assert run("--out", "run", "--steps", "1", "--vocab-size", "300") == 0
    Path("run/chat_template.jinja").write_text(published.CHAT)
    huggingface.export_folder(Path("run"), Path("hf"))
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    assert theirs("é<|endoftext|>")["input_ids"] == [0xC3, 0xA9, 256]
    assert theirs.apply_chat_template(QUESTION, tokenize=False).startswith("<|im_start|>user\n")
    config = json.loads(Path("hf/config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 256
    # and back, as a tokenizer.json
    huggingface.import_folder(Path("hf"), Path("ckpt"))
    back = FileTokenizer(checkpoint.tokenizer_of("ckpt"))
    assert (back.eot, back.bos, back.vocab_size) == (256, None, 257)
    assert back.encode("é\n") == list("é\n".encode())
    capsys.readouterr()
    for source in ("run", "hf", "ckpt"):
        assert generate.main(["--checkpoint", source, "--prompt", "a", *GENERATE]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 1


def test_export_goes_on_without_a_vocabulary(
    here,  # noqa: F811
    gpt2_encoding,
    monkeypatch,
    capsys,
):
    assert run("--out", "run", "--steps", "1", "--tokenizer", "gpt2") == 0
    assert huggingface.main(["export", "run", "with"]) == 0
    assert Path("with/tokenizer.json").exists()

    def no_network(name):
        raise OSError

    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    capsys.readouterr()
    assert huggingface.main(["export", "run", "without"]) == 0
    assert "huggingface.py: without a tokenizer: --tokenizer gpt2" in capsys.readouterr().err
    assert not Path("without/tokenizer.json").exists()
    assert Path("without/model.safetensors").exists()


def test_ranks_that_no_merges_give():
    with pytest.raises(TokenizerError, match=r"b'abc' is not made of two earlier ones"):
        merges_of({b"a": 0, b"b": 1, b"c": 2, b"abc": 3})
    assert merges_of({b"a": 0, b"b": 1, b"bb": 2, b"abb": 3}) == [(b"b", b"b"), (b"a", b"bb")]


def test_a_tokenizer_of_one_file_gets_its_class(here):  # noqa: F811
    """Without tokenizer_config.json transformers would take Llama's class for this model, which
    knows no bytes as characters."""
    published.gpt2(["</s>"]).save("t.json")
    flags = ("--tokenizer", "t.json", "--model", "tiny")
    assert run("--out", "run", "--steps", "1", *flags) == 0
    huggingface.export_folder(Path("run"), Path("hf"))
    ours = FileTokenizer("t.json")
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    assert theirs.eos_token_id == ours.eot
    for text in texts_for(theirs):
        assert theirs(text)["input_ids"] == ours.encode(text)


# --- files that are not read ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_another_form_of_a_tokenizer_is_refused(folders, tmp_path, name, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(folders("gpt2") / "hf", folder)
    (folder / "tokenizer.json").rename(folder / name)
    reason = f"has only {name}; transformers writes a tokenizer.json with AutoTokenizer"
    with pytest.raises(huggingface.HuggingFaceError, match=reason):
        huggingface.import_folder(folder, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()
    assert generate.main(["--checkpoint", str(folder), "--prompt", "a", *GENERATE]) == 2
    assert reason in capsys.readouterr().err
    # the weights alone are a model
    (folder / name).unlink()
    huggingface.import_folder(folder, tmp_path / "ckpt")


# --- more ids than the tokenizer has --------------------------------------------------------------


def test_a_padded_vocabulary_trains_and_generates(folders, here, capsys):  # noqa: F811
    """Qwen's embedding has 271 rows more than its tokenizer has ids. What is trained from it is
    exported with the same files, and ids without a text are none."""
    place = folders("qwen")
    assert run("--load", str(place / "ckpt"), "--out", "run", "--steps", "1") == 0
    huggingface.export_folder(Path("run"), Path("trained"))
    names = sorted(file.name for file in (place / "back").iterdir())
    assert sorted(file.name for file in Path("trained").iterdir()) == names
    for name in names:
        if name not in ("config.json", "model.safetensors"):
            assert (Path("trained") / name).read_bytes() == (place / "back" / name).read_bytes()
    tokenizer = FileTokenizer("run/tokenizer.json")
    beyond = range(tokenizer.vocab_size, VOCAB_SIZE)
    assert len(beyond) == 97 and tokenizer.decode([72, *beyond, 72]) == "ii"
    capsys.readouterr()
    flags = ("--max-tokens", "25", "--temperature", "5", "--top-k", "0", "--top-p", "1")
    for source in (place / "hf", "run", "trained"):
        prompt = ("--checkpoint", str(source), "--prompt", "if a", *GENERATE)
        assert generate.main([*prompt, *flags]) == 0
        assert capsys.readouterr().out.startswith("if a")
    # uniform over 400 ids: the seed draws some of both
    ids = sampled(place / "hf")
    assert min(ids) < tokenizer.vocab_size <= max(ids)


def sampled(folder: Path) -> list[int]:
    model, _ = load_model(folder)
    return generate.generate(model, [[1, 2]], 25, temperature=5.0)[0]


# --- the settings of generation_config.json -------------------------------------------------------


def settings_of(folder: Path, *flags: str) -> tuple[dict, str]:
    """(the sampling flags, the line that says where they are from)."""
    parser = argparse.ArgumentParser()
    cli.add_flags(parser)
    args = parser.parse_args(["--checkpoint", str(folder), *flags])
    line = generation_config.set_defaults(args)
    return {name: getattr(args, name) for name in generation_config.DEFAULTS}, line


SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    "content, flags, changed, line",
    [
        # of a base model: nothing about sampling
        ({"eos_token_id": 5}, "", {}, ""),
        (
            SAMPLED | {"max_new_tokens": 40, "top_k": 0},
            "--top-p 1 --max-tokens 5",
            dict(temperature=0.6, max_tokens=5),
            "--temperature 0.6 --top-k 0: from FILE",
        ),
        (
            {"do_sample": True, "temperature": 1e-06, "top_k": 1, "max_new_tokens": 40},
            "",
            dict(temperature=0.0, top_k=1, max_tokens=40),
            "--max-tokens 40 --temperature 0.0: from FILE",
        ),
        (
            {"temperature": 1, "repetition_penalty": 1.05, "num_beams": 1, "min_p": None},
            "",
            dict(temperature=0.0, top_k=50),
            "--temperature 0.0 (do_sample is not true): from FILE;"
            " not in generate.py: repetition_penalty 1.05",
        ),
        (
            {"num_beams": 4, "eta_cutoff": 0, "bad_words_ids": [[5]], "forced_eos_token_id": None},
            "",
            {},
            "FILE; not in generate.py: num_beams 4, bad_words_ids [[5]]",
        ),
    ],
)
def test_settings_are_defaults(folders, tmp_path, content, flags, changed, line):
    shutil.copytree(folders("gpt2") / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "generation_config.json"
    published.write_json(file, content)
    values, summary = settings_of(tmp_path / "hf", *flags.split())
    assert values == generation_config.DEFAULTS | changed
    assert summary == line.replace("FILE", str(file))


@pytest.mark.parametrize("do_sample", [None, False, True])
def test_settings_are_those_of_transformers(do_sample, folders, tmp_path):
    """Each setting, there or not: what its `generate` would take from the file."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(folders("gpt2") / "hf", tmp_path / "hf")
    choices = dict(temperature=[None, 0.3], top_k=[None, 0, 7], top_p=[None, 0.5])
    for values in itertools.product(*choices.values()):
        told = {"do_sample": do_sample} | dict(zip(choices, values))
        told = {name: value for name, value in told.items() if value is not None}
        published.write_json(tmp_path / "hf" / "generation_config.json", told)
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
        theirs.update(**theirs._get_default_generation_params(), defaults_only=True)
        ours, _ = settings_of(tmp_path / "hf")
        expected = {name: getattr(theirs, name) for name in choices}
        if not theirs.do_sample:
            expected["temperature"] = 0.0
        if told:
            assert {name: ours[name] for name in choices} == expected, told


def test_settings_without_a_file(folders):
    assert settings_of(folders("unigram") / "hf") == (generation_config.DEFAULTS, "")


def test_settings_come_with_the_model(folders, tmp_path, capsys):
    """From the folder, from what was imported and trained; and they change the text."""
    place = folders("llama3")
    texts = {}
    for source in ("hf", "ckpt"):
        flags = ("--checkpoint", str(place / source), "--prompt", "hello", *GENERATE)
        assert generate.main([*flags]) == 0
        out, err = capsys.readouterr()
        file = place / source / "generation_config.json"
        assert f"--top-k 50 (transformers' default) --top-p 0.9: from {file}\n" in err
        texts[source] = out
        given = ("--temperature", "0.6", "--top-p", "0.9", "--top-k", "50")
        assert generate.main([*flags, *given]) == 0
        again, err = capsys.readouterr()
        assert again == out and "from" not in err
    assert texts["hf"] == texts["ckpt"]


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"temperature": "hot"}', "generation_config.json: Expected `float | null`, got `str`"),
        ('{"top_p": 1.5}', "--top-p 1.5: must be above 0 and at most 1"),
        ('{"top_k": -1}', "--top-k -1: must be at least 0"),
    ],
)
def test_settings_that_cannot_be(folders, tmp_path, capsys, content, words):
    folder = tmp_path / "hf"
    shutil.copytree(folders("gpt2") / "hf", folder)
    (folder / "generation_config.json").write_text(content)
    assert generate.main(["--checkpoint", str(folder), "--prompt", "a", *GENERATE]) == 2
    assert words in capsys.readouterr().err


# --- templates in other places --------------------------------------------------------------------


def test_the_template_of_a_model_of_images(tmp_path):
    """chat_template.json is for transformers' processors; here it counts after the others."""
    published.write("unigram", tmp_path)
    published.write_json(tmp_path / "chat_template.json", {"chat_template": "of json"})
    tokenizer = FileTokenizer(str(tmp_path / "tokenizer.json"))
    assert of_tokenizer(tokenizer) == "of json"
    assert "chat_template.json" in tokenizer.files
    edit_json(tmp_path / "tokenizer_config.json", chat_template="of the config")
    tokenizer = FileTokenizer(str(tmp_path / "tokenizer.json"))
    assert of_tokenizer(tokenizer) == "of the config"


@pytest.mark.parametrize("form", ["list", "folder"])
def test_several_templates_and_none_is_called_default(tmp_path, form, capsys):
    """transformers asks for a name then, and here it is --chat-template that chooses."""
    write_model("qwen", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    named = {"tool_use": "T", "rag": "R"}
    if form == "list":
        listed = [{"name": name, "template": text} for name, text in named.items()]
        edit_json(config, chat_template=listed)
    else:
        edit_json(config, chat_template=None)
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in named.items():
            (tmp_path / f"additional_chat_templates/{name}.jinja").write_text(text)
    ours = FileTokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="multiple chat templates with no default"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        theirs.apply_chat_template(QUESTION)
    with pytest.raises(ChatError) as e:
        find_chat(tmp_path, ours)
    assert f"{tmp_path} has the chat templates rag and tool_use, none" in str(e.value)
    assert "--chat-template FILE" in str(e.value)
    (tmp_path / "chosen.jinja").write_text("of a file")
    chosen = open_template(str(tmp_path / "chosen.jinja"), ChatTokenizer(ours))
    assert chosen.text == "of a file"
    # one that is called default is found in both forms
    if form == "list":
        edit_json(config, chat_template=[*listed, {"name": "default", "template": "D"}])
    else:
        (tmp_path / "additional_chat_templates/default.jinja").write_text("D")
    ours = FileTokenizer(str(tmp_path / "tokenizer.json"))
    assert find_chat(tmp_path, ours).template.text == "D"


def test_a_template_that_was_changed_is_found(folders, tmp_path):
    """The checksums of a checkpoint know the files in the folder of templates, and no others."""
    ckpt = tmp_path / "ckpt"
    shutil.copytree(folders("smollm") / "ckpt", ckpt)
    template = ckpt / "additional_chat_templates" / "tools.jinja"
    index = checkpoint.read_index(ckpt)
    assert template in checkpoint.verify_tokenizer(ckpt, index).values()
    (tmp_path / "secret").write_text("no template")
    index["tokenizer"]["files"]["additional_chat_templates/../../secret"] = "0"
    checkpoint.verify_tokenizer(ckpt, index)
    template.write_text("changed")
    with pytest.raises(checkpoint.CheckpointError, match=r"tools\.jinja is altered"):
        checkpoint.tokenizer_of(ckpt)


def test_files_of_another_tokenizer_are_removed(tmp_path):
    published.write("smollm", tmp_path / "a")
    first = FileTokenizer(str(tmp_path / "a" / "tokenizer.json"))
    published.write("unigram", tmp_path / "b")
    second = FileTokenizer(str(tmp_path / "b" / "tokenizer.json"))
    (tmp_path / "run").mkdir()
    for tokenizer in (first, second):
        save_files(tokenizer.files, tmp_path / "run")
        left = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
        assert {str(file.relative_to(tmp_path / "run")) for file in left} == {*tokenizer.files}
