"""What BERT and T5 learn from: text of which a part is hidden, the same under every layout.

    text      Thank you for inviting me to your party last week

    BERT      [CLS] Thank you for [MASK] me to your apple last week         reads
                            .     inviting           party                  fills in

    T5        Thank you <0> me to your party <1> week </s>                  source
              <0> for inviting <1> last </s>                                target

BERT (Devlin et al., arXiv 1810.04805, section 3.1): 15% of the tokens are chosen, whole words
together. Of these 80% become [MASK], 10% a random token, 10% stay. The loss is that of the chosen.

T5 (Raffel et al., arXiv 1910.10683, section 3.1.4): 15% of the tokens, in spans of 3 on average,
become one sentinel each. Numbers of tokens and of spans are fixed, so every source has the same
length, and every target; their places are random. As in the published code a text never begins
with a span, and always ends with one.

What is hidden is a hash of (seed, sample, position), as dropout's masks are (base/dropout.py). A
sample of the run has one number, so every epoch hides other tokens, and no rank needs to know what
another one does. Held-out text is hidden with seed 0: the same way at each evaluation.

Under --document-mask the documents of run/data.py travel along. A span belongs to the document of
its first token; </s> and padding, to that of the last span.

Not covered: sentences as samples (a sample may begin inside of one); n-grams, and BERT's second
text of a pair.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from base.dropout import dropout_key, position_hash, threshold
from base.model_config import FieldError
from inference.token_bytes import token_bytes
from models.batch import Batch
from models.special_tokens import BertTokens, bert_tokens, t5_tokens
from run.data import Blend, Corpus, Dataset
from run.tokenizer import TokenizerError

# The share of tokens that are hidden, and the mean length of T5's spans.
DENSITY = 0.15
SPAN = 3
# Of BERT's chosen tokens: the share that becomes [MASK], and with it that of random tokens.
MASKED, REPLACED = 0.8, 0.9


class Hidden(Dataset):
    """Text of which a part is hidden. batch(samples) gives a models.batch.Batch."""

    def __init__(self, text: Corpus | Blend, seed: int, tokenizer):
        self.text, self.seed, self.eot = text, seed, tokenizer.eot
        self.num_sequences = text.num_sequences
        # Without the number of bytes: the loss is not that of text.
        self.index = {name: text.index[name] for name in ("corpus", "tokens")}

    def taken(self, n: int) -> dict | None:
        return self.text.taken(n)

    def go_on(self, n: int, taken: dict) -> None:
        self.text.go_on(n, taken)

    def hash(self, samples: Tensor, site: int, n: int) -> Tensor:
        """Uniform over the signed 32-bit integers, [b, n]. site: which of several for a token."""
        # Dropout's keys are those of steps from 1.
        return position_hash(dropout_key(self.seed, 0, samples), site, (len(samples), n), {})


# --- BERT -----------------------------------------------------------------------------------------


class Words(NamedTuple):
    """Which tokens of a vocabulary are one word. [V] bool each"""

    goes_on: Tensor  # It belongs to the word of the token before it ..
    ends: Tensor  # .. unless that is one of these.


def words_of(tokenizer, tokens: BertTokens) -> Words:
    """In WordPiece a word goes on with ##. In others a token goes on with the word before it if it
    begins with a letter or a digit, and that one ends so. Spaces and signs begin words, and so do
    characters of three bytes or more in UTF-8: Chinese has no spaces."""
    goes_on, ends = torch.zeros(2, tokens.vocab_size, dtype=torch.bool)
    model = getattr(getattr(tokenizer, "tokenizer", None), "model", None)
    if prefix := getattr(model, "continuing_subword_prefix", None):
        for name, i in tokenizer.vocabulary.items():
            goes_on[i] = name.startswith(prefix)
    else:
        spelled = token_bytes(tokenizer)
        pieces = [(i, spelled.of(i)) for i in range(tokenizer.vocab_size)]
        for i, piece in filter(lambda each: each[1], pieces):
            goes_on[i] = is_of_word(piece[0]) and piece[0] < 0xE0
            ends[i] = not is_of_word(piece[-1])
    unknown = getattr(model, "unk_token", None)
    names = getattr(tokenizer, "vocabulary", {}).items()
    text = [i for name, i in names if name != unknown and i not in tokens.names]
    if text and (goes_on & ~ends)[text].all():
        rule = "none of its tokens begins a word, so nothing would be hidden"
        raise TokenizerError(f"--tokenizer {tokenizer.name}: {rule}")
    special = list(tokens.names)
    goes_on[special], ends[special] = False, True
    return Words(goes_on, ends)


def is_of_word(byte: int) -> bool:
    """Whether a letter or a digit in UTF-8 may have this byte."""
    return byte > 127 or chr(byte).isalnum()


class HiddenWords(Hidden):
    """What BERT learns from: [CLS], then text of `text.s` tokens."""

    def __init__(self, text: Corpus | Blend, seed: int, tokenizer):
        super().__init__(text, seed, tokenizer)
        self.s, self.tokens = text.s + 1, bert_tokens(tokenizer)
        self.words = words_of(tokenizer, self.tokens)
        # The samples that were counted last, and their count.
        self.counted = None, 0

    def batch(self, samples) -> Batch:
        of_text = self.text.batch(samples)
        tokens, numbers, documents = self.tokens, of_text.samples, of_text.documents
        ids = of_text.tokens.masked_fill(of_text.tokens == self.eot, tokens.sep)
        targets = F.pad(ids, (1, 0), value=tokens.cls)  # [b, s]
        chosen = self.choose(targets, numbers)
        how, which = (self.hash(numbers, site, self.s) for site in (1, 2))
        hidden = torch.where(how < threshold(REPLACED), which.long() % tokens.vocab_size, targets)
        hidden = hidden.masked_fill(how < threshold(MASKED), tokens.mask)
        if documents is not None:
            documents = torch.cat((documents[:, :1], documents), 1)
        return Batch(torch.where(chosen, hidden, targets), targets, chosen, numbers, documents)

    def choose(self, ids: Tensor, samples: Tensor) -> Tensor:
        """Which tokens are chosen: words whose first token has a small hash. ids: [b, s]"""
        goes_on = self.words.goes_on[ids]
        goes_on[:, 0] = False
        goes_on[:, 1:] &= ~self.words.ends[ids[:, :-1]]
        at = torch.arange(self.s).expand_as(ids)
        first = at.masked_fill(goes_on, 0).cummax(1).values  # [b, s], where the word begins
        chosen = self.hash(samples, 0, self.s) < threshold(DENSITY)
        return chosen.gather(1, first) & ~torch.isin(ids, torch.tensor(list(self.tokens.names)))

    def counted_tokens(self, samples) -> int:
        # A step asks twice.
        if self.counted[0] != samples:
            self.counted = samples, int(self.batch(samples).loss_mask.sum())
        return self.counted[1]


# --- T5 -------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """Tokens of a text, how many of them are hidden, and in how many spans; and of what it becomes,
    with sentinels and </s>."""

    text: int
    hidden: int
    spans: int
    source: int
    target: int


def lengths_of(source: int) -> Lengths:
    """Those of the longest text whose source has so many tokens. Raises FieldError."""
    found = None
    for n in itertools.count(2):
        hidden = max(1, round(n * DENSITY))
        spans = max(1, round(hidden / SPAN))
        lengths = Lengths(n, hidden, spans, n - hidden + spans + 1, hidden + spans + 1)
        if lengths.source > source:
            break
        found = lengths
    if not found:
        rule = "is no room for a text with a hidden span"
        raise FieldError("seq_length", source, rule, lengths.source)
    return found


def check_spans(source: int, target: int, sentinels: int) -> None:
    """Raises FieldError for a seq_length with more spans than there are sentinels, or with targets
    that are longer than target_length."""
    lengths = lengths_of(source)
    if lengths.spans > sentinels:
        rule = f"has {lengths.spans} hidden spans, and there are {sentinels} sentinels"
        raise FieldError("seq_length", source, f"{rule}; 512 would fit")
    if lengths.target > target:
        rule = f"the targets of {{seq_length}} have {lengths.target} tokens"
        raise FieldError("target_length", target, rule, lengths.target, seq_length=source)


class HiddenSpans(Hidden):
    """What T5 learns from: [source | decoder input], the first of n tokens; and targets of m."""

    def __init__(self, text: Corpus | Blend, seed: int, tokenizer, n: int, m: int):
        """text: of lengths_of(n).text tokens."""
        super().__init__(text, seed, tokenizer)
        self.tokens, self.lengths = t5_tokens(tokenizer), lengths_of(n)
        self.s, self.target_length = n + m, m

    def batch(self, samples) -> Batch:
        of_text = self.text.batch(samples)
        tokens, numbers = self.tokens, of_text.samples
        ids = of_text.tokens.masked_fill(of_text.tokens == self.eot, tokens.eos)
        segment, begin = self.segments(numbers)
        sentinel = torch.tensor(tokens.sentinels)[segment // 2]
        end = torch.full_like(ids[:, :1], tokens.eos)
        source, target = self.parts(segment, begin, ids, sentinel, end)
        padding = self.target_length - target.shape[1]
        counts = F.pad(torch.ones_like(target, dtype=torch.bool), (0, padding))  # [b, m]
        target = F.pad(target, (0, padding), value=tokens.pad)  # [b, m]
        # What the decoder reads: each target but the last, after the padding token.
        reads = F.pad(target[:, :-1], (1, 0), value=tokens.pad)
        documents = of_text.documents
        if documents is not None:
            of_source, of_target = self.documents_of(documents, segment, begin)
            # It reads that token at the beginning of each document.
            begins = of_target.diff(dim=1, prepend=of_target[:, :1]) != 0
            reads = reads.masked_fill(begins, tokens.pad)
            documents = torch.cat((of_source, of_target), 1)
        return Batch(torch.cat((source, reads), 1), target, counts, numbers, documents)

    def parts(self, segment, begin, of_tokens, of_spans, end) -> tuple[Tensor, ...]:
        """What stands for each token of the source, and of the target without padding. segment,
        begin: of `segments`; of_tokens, of_spans: what stands for the token at each position, and
        for the span that it is in, [b, s]; end: for </s>, [b, 1]."""
        hidden = segment % 2 == 1  # [b, s]
        first = hidden & (begin == torch.arange(self.lengths.text))  # [b, s], of its span
        source = torch.where(hidden, of_spans, of_tokens)[~hidden | first]
        target = torch.stack((of_spans, of_tokens), 2)[torch.stack((first, hidden), 2)]
        return tuple(torch.cat((x.view(len(end), -1), end), 1) for x in (source, target))

    def documents_of(self, documents: Tensor, segment: Tensor, begin: Tensor) -> tuple:
        """The documents of the source, [b, n], and of the target, [b, m]. documents: of the text,
        [b, s]"""
        at = torch.where(segment % 2 == 1, begin, torch.arange(self.lengths.text))
        documents = documents.gather(1, at)
        source, target = self.parts(segment, begin, documents, documents, documents[:, -1:])
        padding = target[:, -1:].expand(-1, self.target_length - target.shape[1])
        return source, torch.cat((target, padding), 1)

    def segments(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """(number, first position) of each token's segment, [b, s] int64 each. Segments 0, 2, ..
        stay, and 1, 3, .. are hidden."""
        text, hidden, *_ = self.lengths
        sizes = self.partition(samples, 0, text - hidden), self.partition(samples, 1, hidden)
        sizes = torch.stack(sizes, 2).flatten(1)
        ends = sizes.cumsum(1)  # [b, 2 spans]
        at = torch.arange(text).repeat(len(samples), 1)
        segment = torch.searchsorted(ends, at, right=True)
        return segment, (ends - sizes).gather(1, segment)

    def partition(self, samples: Tensor, site: int, n: int) -> Tensor:
        """Random sizes of segments, as many as spans, each at least 1, n together. [b, spans]"""
        order = self.hash(samples, site, n - 1).argsort(dim=1, stable=True)
        cuts = order[:, : self.lengths.spans - 1].sort(1).values + 1
        return F.pad(F.pad(cuts, (1, 0)), (0, 1), value=n).diff()

    def counted_tokens(self, samples) -> int:
        return len(samples) * self.lengths.target
