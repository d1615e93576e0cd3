"""The lesson of models/bert.py: who sees whom; what a technique needs of a new model."""

import torch

import gpt
from course import demo, form
from models import bert

WITHOUT = form.Removals()


@WITHOUT.replace("both-ways", bert, "same_document", "Whose logits no longer change?")
def causal(documents):
    """Those of the tokens before it. With a causal mask a token has seen only what is to its left:
    a GPT with BERT's head, which must guess a word before it has read the rest of the sentence.
    The loss on two ranks is wrong too, because their model alone has this mask."""
    s = documents.shape[1]
    return torch.ones(s, s, dtype=torch.bool).tril().expand(len(documents), 1, s, s)


@WITHOUT.replace("types", bert.Embedding, "forward", "Which rank embeds its tokens wrongly?")
def types_of_the_first_shard(self, tokens, context=bert.PLAIN):
    """Rank 1. Under sequence parallelism it has tokens 8 to 15, and adds to them the types of
    tokens 0 to 7. No shape differs, so nothing fails; the model only learns which text a word is in
    from wrong words."""
    x = self.positions(self.tokens(tokens), context.documents)
    types = torch.zeros_like(tokens) if context.types is None else context.types
    x = x + self.types(types[:, : x.shape[1]])
    return self.dropout(self.norm(x), context.drop_key)


S, V, CHANGED = 16, 64, 5


def config() -> bert.BertConfig:
    return demo.tiny_config(bert.BertConfig, seq_length=S, vocab_size=V)


@torch.no_grad()
def changed_logits(model: gpt.GPT, context) -> list[int]:
    """The positions whose logits change with token CHANGED."""
    tokens, _ = demo.random_tokens(1, S, V)
    changed = tokens.clone()
    changed[0, CHANGED] = (changed[0, CHANGED] + 1) % V
    return demo.positions_changed(*(model(x, None, context) for x in (tokens, changed)))


def seen(rank: int) -> dict[str, list[int]]:
    # One document.
    documents = torch.zeros(1, S, dtype=torch.int64)
    decoder = demo.make_model(demo.tiny_config(seq_length=S, vocab_size=V))
    encoder = demo.make_model(config())
    return {
        "gpt": changed_logits(decoder, gpt.PLAIN),
        "bert": changed_logits(encoder, bert.Context(documents=documents)),
    }


def one_step(rank: int) -> dict:
    """With the embedded tokens, [b, S or S / 2, h]."""
    model = demo.sharded_model(config())
    tokens, targets = demo.random_tokens(4, S, V)
    # The second text of a pair begins at token 6 of each row.
    types = (torch.arange(S) >= 6).long().expand(4, S)
    context = bert.Context(documents=torch.zeros_like(types), types=types)
    embedded = model.embedding(tokens, context).detach()
    return demo.one_step(model, tokens, targets, context) | {"embedded": embedded}


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"Token {CHANGED} of {S} is changed. Of how many tokens do the logits change, in a GPT and"
        " in a BERT?",
        "GPT; BERT",
    )
    (of,) = lesson.on_ranks(1, seen)
    counts = [len(of["gpt"]), len(of["bert"])]
    lesson.check(
        f"GPT {counts[0]}, itself and those after it; BERT {counts[1]} of {S}",
        of["gpt"] == list(range(CHANGED, S)) and of["bert"] == list(range(S)),
        counts,
    )
    lesson.predict(
        "tensor_parallel.py and sequence_parallel.py have no line about BERT. Two ranks share it."
        " Which of its parts must know its shard of the sequence: 1, attention; 2, the embedding;"
        " 3, the head?",
        "part",
    )
    one, two = lesson.one_and_many(2, one_step)
    embedded = torch.cat([of_rank["embedded"] for of_rank in two], 1)
    lesson.check(
        "2, the embedding: it adds the types of a rank's own tokens. What it gives on two ranks is"
        " what it gives on one",
        torch.allclose(embedded, one["embedded"], rtol=0, atol=1e-12),
        [2],
    )
    demo.check_step(lesson, one, two[0])


if __name__ == "__main__":
    form.run("bert")
