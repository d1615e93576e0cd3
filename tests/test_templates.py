"""The chat templates that trl ships: texts, tokens and targets are those of `transformers`.

For most of them trl has a twin, which marks with {% generation %} what the assistant writes.
`transformers` makes a mask of the marks: the oracle for ours, which comes from the template as it
was published. Where ours is another one on purpose, DIFFERENCES says how, and why."""

import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
import test_sft

from finetune import preference_data
from finetune.chat import Chat, message
from finetune.chat_template import ChatError, ChatTokenizer, open_template
from run.tokenizer import ByteTokenizer, FileTokenizer

transformers = pytest.importorskip("transformers", reason="pyproject.toml names it")
spec = importlib.util.find_spec("trl")
if spec is None:
    pytest.skip("pyproject.toml names trl", allow_module_level=True)
FOLDER = Path(spec.submodule_search_locations[0]) / "chat_templates"
STEMS = [path.stem for path in sorted(FOLDER.glob("*.jinja")) if "_training" not in path.stem]
TWINS = [stem for stem in STEMS if (FOLDER / f"{stem}_training.jinja").exists()]
# what looks like a special token in a template
SPECIAL = r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|</?think>"
SPECIAL += r"|<(?:start|end)_of_(?:turn|utterance)>"
# tokens at which the published model stops, beside its end of text (generation_config.json)
STOPS = {"glm4moe": ["<|user|>"], "gptoss": ["<|return|>"]}

# Templates -> (what the twin counts before ours, what it counts behind ours).
NEMOTRON = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")
CHATML = ("lfm2", "qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl")
DIFFERENCES = {
    # generation has ended at the token before the line break
    **dict.fromkeys(CHATML, ("", "\n")),
    **dict.fromkeys(("gemma", "gemma3", "diffusion_gemma"), ("", "\n")),
    **dict.fromkeys(("idefics3", "phi3", "phi3_5"), ("", "\n")),
    # the text for asking has it: the model never writes it
    "qwen2_5": ("\n", "\n"),
    "gptoss": ("<|start|>assistant", ""),
    "muse_glimmer": ("<|start|>assistant", ""),
    **dict.fromkeys(("deepseekv3", "deepseek_r1_distill"), ("<｜Assistant｜>", "")),
    **dict.fromkeys(NEMOTRON, ("<think>", "\n")),
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), ("<think>\n", "\n")),
    "qwen3_5_nothink": ("<think>\n\n</think>\n\n", "\n"),
}
# the twin has an empty thought in every turn; as published, only the last turn has one
LAST_THINKS = {"qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6"}
# the twin counts the end of text behind all turns, where no generation comes
ENDS_THE_TEXT = {"phi3", "phi3_5"}
# the text for asking begins a thought, which answers in a conversation do not have
ASK_OTHERWISE = {"deepseekv3", "deepseek_r1_distill", *NEMOTRON}
ENDS = dict.fromkeys(STEMS, "<|im_end|>") | {
    **dict.fromkeys(("cohere", "cohere2"), "<|END_OF_TURN_TOKEN|>"),
    **dict.fromkeys(("deepseekv3", "deepseek_r1_distill"), "<｜end▁of▁sentence｜>"),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), "<turn|>"),
    **dict.fromkeys(("gemma", "gemma3"), "<end_of_turn>"),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(("phi3", "phi3_5"), "<|end|>"),
    **{"glm4moe": "<|user|>", "gptoss": "<|return|>", "idefics3": "<end_of_utterance>"},
    **{"llava_next": "</s>", "muse_glimmer": "<|eot|>"},
}
# what the template takes out of an answer, as it does with a thought
REFUSED = {("diffusion_gemma", "<|channel>"), ("diffusion_gemma", "<channel|>")}
THINK = ("<think>", "</think>")
ANSWERS = ("", "a", "in", "hi", "k", "think", "final", "user", "5.", " x ", "\n", "<|im_end|>")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Template -> (its text, our Chat, the tokenizer of `transformers`), from one folder."""

    @functools.cache
    def of(stem: str):
        text = (FOLDER / f"{stem}.jinja").read_text()
        folder = tmp_path_factory.mktemp(stem)
        specials = sorted({"<s>", "</s>", *re.findall(SPECIAL, text)})
        tokenizer = test_sft.byte_pairs(specials)
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": text}
        names |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        ids = [tokenizer.token_to_id(token) for token in ("</s>", *STOPS.get(stem, ()))]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        ours = FileTokenizer(str(folder / "tokenizer.json"))
        return text, test_sft.chat_of(ours), theirs

    return of


def conversation(answers) -> list[dict]:
    """A question before each answer, in which the answer's text stands too."""
    messages = []
    for answer in answers:
        messages += [message("user", f"say {answer} in a word"), message("assistant", answer)]
    return messages


def in_their_form(chat: Chat, messages: list[dict]) -> list[dict]:
    """A template of images has contents in parts."""
    if not chat.template.in_parts:
        return messages
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


def masked_by(theirs, chat: Chat, messages: list[dict], template: str) -> dict:
    """What transformers gives: input_ids and assistant_masks."""
    options = dict(return_dict=True, return_assistant_tokens_mask=True)
    form = in_their_form(chat, messages)
    return theirs.apply_chat_template(form, chat_template=template, **options)


def spans(ids, counted, theirs) -> list[str]:
    """The texts of the tokens that count and are neighbours."""
    found = [[]]
    for token, counts in zip(ids, counted, strict=True):
        if counts:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    return [theirs.decode(span, skip_special_tokens=False) for span in found if span]


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_every_template_is_rendered_as_transformers_does(opened, stem):
    """And can be served: it asks, and there is a token at which an answer ends."""
    _, chat, theirs = opened(stem)
    assert chat.template.in_parts == (stem in ("idefics3", "llava_next"))
    messages = conversation(["a", "", "It is 5,\nI think. 🙂"])
    for n in range(1, len(messages) + 1):
        ask = messages[n - 1]["role"] == "user"
        form = in_their_form(chat, messages[:n])
        text = theirs.apply_chat_template(form, add_generation_prompt=ask, tokenize=False)
        assert chat.template.render(messages[:n], ask).text == text
        ids = theirs.apply_chat_template(form, add_generation_prompt=ask, return_dict=False)
        found = chat.prompt(messages[:n]) if ask else chat.tokenizer.encode(text).ids
        assert found == list(ids)
    assert theirs.decode([chat.end_of_turn()]) == ENDS[stem]
    assert chat.learns_what_is_asked() == (stem not in ASK_OTHERWISE)


def test_a_turn_without_an_end_is_served(opened):
    """It ends at the end of text. GLM ends a turn at the token that begins the next one, which its
    generation_config.json names; without that file nothing shows it, and nothing is learned."""
    _, chat, theirs = opened("glm4moe")
    tokenizer = chat.tokenizer.tokenizer
    # of that file
    bare = ChatTokenizer(FileTokenizer(tokenizer.name))
    bare.tokenizer.stop_ids = (tokenizer.eot,)
    chat = Chat(chat.template, bare)
    assert chat.end_of_turn() == tokenizer.eot and theirs.decode([tokenizer.eot]) == "</s>"
    with pytest.raises(ChatError, match="no special token"):
        chat.example(conversation(["a"]))


# --- targets --------------------------------------------------------------------------------------


def expected(stem: str, span: str, is_last: bool) -> str:
    """What ours counts of a span of the twin."""
    before, behind = DIFFERENCES.get(stem, ("", ""))
    if stem in ENDS_THE_TEXT and is_last:
        behind += "</s>"
    if stem in LAST_THINKS and not is_last:
        before = "<think>\n\n</think>\n\n"
    assert span.startswith(before) and span.endswith(behind)
    return span.removeprefix(before).removesuffix(behind)


@pytest.mark.parametrize("stem", TWINS)
def test_targets_are_those_of_the_twin(opened, stem):
    text, chat, theirs = opened(stem)
    twin = (FOLDER / f"{stem}_training.jinja").read_text()
    answers = [*ANSWERS, *dict.fromkeys(re.findall(SPECIAL, text))][:24]
    answers = [each for each in answers if (stem, each) not in REFUSED and each not in THINK]
    if stem == "qwen3":
        # as published, an earlier turn keeps a line break that the twin leaves out
        answers.remove("\n")
    for turns in (1, 2, 3, 4):
        for n in range(0, len(answers), turns if turns > 1 else 1):
            said = (answers[n:] + answers)[:turns]
            messages = conversation(said)
            masked = masked_by(theirs, chat, messages, twin)
            spans_of_twin = spans(masked["input_ids"], masked["assistant_masks"], theirs)
            last = len(spans_of_twin) - 1
            want = [expected(stem, span, k == last) for k, span in enumerate(spans_of_twin)]
            example = chat.example(messages)
            assert spans(*example, theirs) == want, said
            if stem not in LAST_THINKS:
                assert example.ids == list(masked["input_ids"])


@pytest.mark.parametrize("stem", [*TWINS, "lfm2_2_5", "lfm2_2_5_vl"])
def test_marked_blocks_have_the_masks_of_transformers(opened, tmp_path, stem):
    """The twins as templates of a model."""
    _, chat, theirs = opened(stem)
    file = FOLDER / f"{stem}_training.jinja"
    file = file if file.exists() else FOLDER / f"{stem}.jinja"
    marked = Chat(open_template(str(file), chat.tokenizer), chat.tokenizer)
    for said in (["in"], ["", "k"], ["think", "", "a"]):
        messages = conversation(said)
        masked = masked_by(theirs, chat, messages, file.read_text())
        counted = [bool(counts) for counts in masked["assistant_masks"]]
        if stem == "llava_next":
            # the space at the end of its block has a place behind itself in their offsets
            assert not counted[-1]
            counted[-1] = True
        assert marked.example(messages) == (list(masked["input_ids"]), counted)
    assert marked.end_of_turn() == chat.end_of_turn()


@pytest.mark.parametrize("stem", sorted({*STEMS} - ASK_OTHERWISE - {"lfm2_2_5", "lfm2_2_5_vl"}))
def test_a_target_follows_what_the_model_is_asked_with(opened, stem):
    """In the last turn: the first target is the token that comes after the prompt. And the answer
    alone is what differs between the targets of two answers."""
    _, chat, theirs = opened(stem)
    before, behind = spans(*chat.example(conversation(["a", "zz"])), theirs)[-1].split("zz")
    assert behind.strip().endswith(ENDS[stem])
    for answer in ANSWERS:
        messages = conversation(["a", answer])
        ids, counted = chat.example(messages)
        asked = chat.prompt(messages[:-1])
        first = max(n for n in range(1, len(ids)) if counted[n] and not counted[n - 1])
        assert ids[:first] == asked[:first] and first >= len(asked) - 1
        # templates differ in the white space around an answer
        targets = spans(ids, counted, theirs)[-1]
        assert "".join(targets.split()) == "".join((before + answer + behind).split())


THOUGHT = "<think>\nWhy\n</think>\n\nso"


@pytest.mark.parametrize(
    "stem, targets",
    [
        ("qwen3", "<think>\nWhy\n</think>\n\nso<|im_end|>"),
        ("qwen3_5_think", "Why\n</think>\n\nso<|im_end|>"),
        ("nemotron_3_nano", "Why\n</think>\n\nso<|im_end|>"),
        ("glm4moe", "\n<think>Why</think>\nso<|user|>"),
        ("qwen3_vl", THOUGHT + "<|im_end|>"),
        ("deepseek_r1_distill", None),
        ("deepseekv3", None),
    ],
)
def test_thoughts_in_an_answer(opened, stem, targets):
    """A template may move a thought. One that leaves it out would teach an answer without it."""
    _, chat, theirs = opened(stem)
    if targets is None:
        words = r"message 2: .* leaves out or changes a part of the answer"
        with pytest.raises(ChatError, match=words):
            chat.example(conversation([THOUGHT]))
    else:
        assert spans(*chat.example(conversation([THOUGHT])), theirs) == [targets]


def test_the_thought_of_an_earlier_turn(opened):
    """Qwen3's template keeps it in the last turn alone."""
    _, chat, theirs = opened("qwen3")
    messages = conversation([THOUGHT, THOUGHT])
    with pytest.raises(ChatError, match=r'message 2: .* "weight": 0'):
        chat.example(messages)
    messages[1]["weight"] = 0
    targets = ["<think>\nWhy\n</think>\n\nso<|im_end|>"]
    assert spans(*chat.example(messages), theirs) == targets


def test_answers_that_a_template_does_not_write_once(tmp_path):
    chat = chat_of_text(tmp_path, "{% for m in messages %}{{ m.role }}{% endfor %}{{ eos_token }}")
    with pytest.raises(ChatError, match="writes the content of message 2 0 times"):
        chat.example(conversation(["a"]))
    chat = chat_of_text(tmp_path, "{% for m in messages %}{{ m.content * 2 }}{% endfor %}")
    with pytest.raises(ChatError, match="writes the content of message 2 2 times"):
        chat.example(conversation(["a"]))
    longer = "{{ messages[1:] | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatError, match="message 2: the answer cannot be found"):
        chat_of_text(tmp_path, longer).example(conversation(["a"]))


def test_templates_do_not_see_weights(tmp_path):
    chat = chat_of_text(tmp_path, "{% for m in messages %}{{ m | tojson }}{% endfor %}")
    messages = conversation(["a"])
    weighed = [each | {"weight": 1} for each in messages]
    assert chat.template.render(weighed) == chat.template.render(messages)


def test_answers_that_a_template_changes(tmp_path):
    """They are not learned. Such a model can be asked all the same."""
    text = "{% for m in messages %}{{ m.content | upper }}{{ eos_token }}{% endfor %}"
    chat = chat_of_text(tmp_path, text)
    with pytest.raises(ChatError, match="changes a part of the answer"):
        chat.example(conversation(["a"]))
    assert chat.end_of_turn() == chat.tokenizer.tokenizer.eot


def chat_of_text(folder: Path, text: str) -> Chat:
    return test_sft.chat_of(ByteTokenizer(), test_sft.write(folder / "t.jinja", text))


# --- weights, pairs -------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", ["", "_training"])
@pytest.mark.parametrize("stem", ["qwen3_instruct_2507", "gptoss", "phi3", "diffusion_gemma"])
def test_a_message_of_weight_0_is_no_target(opened, stem, twin):
    """Whether or not the template marks answers, which may be in several blocks."""
    _, chat, theirs = opened(stem)
    file = FOLDER / f"{stem}{twin}.jinja"
    chat = Chat(open_template(str(file), chat.tokenizer), chat.tokenizer)
    messages = conversation(["a", "in", "think"])
    whole = chat.example(messages)
    three = spans(*whole, theirs)
    assert len(three) == 3
    for weights in ((0, 1, 0), (1, 0, 1), (0, 0, 1)):
        for each, weight in zip(messages[1::2], weights):
            each["weight"] = weight
        example = chat.example(messages)
        kept = [span for span, weight in zip(three, weights) if weight]
        assert spans(*example, theirs) == kept and example.ids == whole.ids
    for n in (0, 1):
        silent = [each | {"weight": int(k != n)} for k, each in enumerate(messages)]
        with pytest.raises(ChatError, match="--loss-on all"):
            chat.example(silent, "all")
    with pytest.raises(ChatError, match="nothing to learn"):
        chat.example([each | {"weight": 0} for each in messages])


@pytest.mark.parametrize(
    "stem, form",
    [
        ("qwen3", "<think>\n\n</think>\n\n{}<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>{}<|return|>"),
        ("cohere2", "{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("glm4moe", "\n<think></think>\n{}<|user|>"),
        # whose template is marked
        ("phi3_training", "{}<|end|>\n</s>"),
    ],
)
def test_both_answers_of_a_pair_are_cut_alike(opened, stem, form):
    """Behind the last answer, which alone counts."""
    _, chat, theirs = opened(stem.removesuffix("_training"))
    chat = Chat(open_template(str(FOLDER / f"{stem}.jinja"), chat.tokenizer), chat.tokenizer)
    for answer in ("in", "zz", "think", "final"):
        example = preference_data.answer_example(chat, conversation(["k", answer]))
        assert spans(*example, theirs) == [form.format(answer)] and example.counted[-1]


# --- names of special tokens ----------------------------------------------------------------------

OBJECT = {"__type": "AddedToken", "content": "<i>", "special": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_special_tokens": {"image_token": "<i>", "boi": "<b>"}},
        {"extra_special_tokens": {"image_token": OBJECT}},
        {"extra_special_tokens": {"eos_token": "<i>"}},
        {"extra_special_tokens": ["<i>"]},
        {"model_specific_special_tokens": {"image_token": "<i>"}},
        {"model_specific_special_tokens": {"image_token": OBJECT}},
        {"model_specific_special_tokens": {"a": "<a>"}, "extra_special_tokens": {"boi": "<b>"}},
        {"model_specific_special_tokens": {"a": "<a>"}, "image_token": "<i>"},
        {"image_token": "<i>", "mask_token": "<m>", "add_bos_token": True, "pad_token": None},
        {"image_token": OBJECT, "mask_token": OBJECT, "eos_token": OBJECT},
        {"additional_special_tokens": ["<i>"], "unk_token": "<u>"},
    ],
)
def test_names_of_special_tokens(fields, tmp_path):
    """A template sees those that it sees in transformers, and no others."""
    tokenizer = test_sft.byte_pairs(["<i>", "<a>", "<b>", "<m>", "<u>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    known = ["image_token", "boi", "a", "mask_token", "unk_token", "eos_token", "pad_token"]
    text = "{{ messages[0].content }}" + "".join(f"|{name}={{{{ {name} }}}}" for name in known)
    names = {"eos_token": "</s>", "chat_template": text} | fields
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat = test_sft.chat_of(FileTokenizer(str(tmp_path / "tokenizer.json")))
    messages = [message("user", "q")]
    expected_text = theirs.apply_chat_template(messages, tokenize=False)
    assert chat.template.render(messages).text == expected_text
    assert chat.template.tokens == theirs.special_tokens_map
