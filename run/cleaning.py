"""One document of training text: cleaned, judged by rules, rid of test sets.

A 13-gram of a test text is cut out, with 200 characters on either side and on to the end of a
sentence (GPT-3, arXiv 2005.14165, appendix C). A test text of 8 to 12 words is one n-gram. Words
have no case and no punctuation. They are 64-bit hashes, as n-grams are: some two of k different
ones are equal with probability k^2 / 2^65.

Not covered: HTML; languages, and text without spaces; the classifier of quality that MT-NLG (arXiv
2201.11990) trained; n-grams that GPT-3 leaves because training text has them often.
"""

import re
from collections import Counter
from functools import lru_cache, partial
from hashlib import blake2b

import ftfy
import numpy as np

from run.documents import read_documents

# The writer may have meant these, so they are left.
LEFT = ("unescape_html", "fix_latin_ligatures", "fix_character_width", "uncurl_quotes")
REPAIRS = ftfy.TextFixerConfig(**dict.fromkeys(LEFT, False))
# A line without anything to repair; a word.
PLAIN, WORD = re.compile(r"[\t -~]*\n?"), re.compile(r"[^\W_]+")
# Words of a shingle, as Lee et al. (arXiv 2107.06499).
SHINGLE = 5
# An odd number has an inverse mod 2^64, so multiplication by it loses no bit.
M = np.uint64(0x9E3779B97F4A7C15)
# Of test sets: words of an n-gram; characters beside it; characters of a piece, and pieces.
SHORTEST, LONGEST, MARGIN, SHORTEST_PIECE, MOST_PIECES = 8, 13, 200, 200, 10


def clean(text: str, counts: Counter) -> str:
    """Repair a text, for example `doesnâ€™t`. counts: of the documents that are changed."""
    # A soft hyphen is no part of a word.
    lines = text.replace("\N{SOFT HYPHEN}", "").splitlines(keepends=True)
    lines = [line if PLAIN.fullmatch(line) else ftfy.fix_text(line, REPAIRS) for line in lines]
    repaired = "".join(lines)
    tidy = "\n".join(line.rstrip() for line in repaired.split("\n"))
    tidy = re.sub(r"\n{3,}", "\n\n", tidy).strip("\n")
    counts["changed: repaired"] += repaired != text
    counts["changed: white space"] += tidy != repaired
    return tidy


@lru_cache(2**18)
def word_hash(word: str) -> int:
    """64 bits of a word without case."""
    return int.from_bytes(blake2b(word.lower().encode(), digest_size=8).digest(), "little")


def grams(hashes: np.ndarray, n: int) -> np.ndarray:
    """[words - n + 1] Hashes of the n-grams: sum_i h_i M^(n - i) mod 2^64."""
    count = max(0, len(hashes) - n + 1)
    total = np.zeros_like(hashes[:count])
    for i in range(n):
        total = (total + hashes[i : i + count]) * M
    return total


class Text:
    """A document: split at white space, at line ends; its words, their hashes, its shingles."""

    def __init__(self, text: str):
        self.text, self.tokens = text, text.split()
        self.lines = [line.strip() for line in text.split("\n") if line.strip()]
        # Signs alone are one word; a text shorter than a shingle is one shingle.
        self.words = WORD.findall(text) or [text]
        self.lengths = np.fromiter(map(len, self.words), np.int64)
        self.hashes = np.fromiter(map(word_hash, self.words), np.uint64)
        self.shingles = np.unique(grams(self.hashes, min(SHINGLE, len(self.words))))


def repeated(items: list[str], weight=len) -> float:
    """The share of items that stood before: of their characters, or of another weight."""
    return 1 - sum(map(weight, set(items))) / sum(map(weight, items))


def one(item: str) -> int:
    """The weight with which items are counted."""
    return 1


def repeated_grams(n: int, x: Text) -> float:
    """The share of characters in the most frequent n-gram (n < 5), or in all that stood before.
    Overlaps count once. 0 if no n-gram is repeated."""
    mine = grams(x.hashes, n)
    found, first, counts = np.unique(mine, return_index=True, return_counts=True)
    if len(found) == len(mine):
        return 0.0
    # [words - n + 1] Whether an n-gram that counts begins here.
    begins = mine == found[counts.argmax()] if n < 5 else ~np.isin(np.arange(len(mine)), first)
    inside = np.zeros(len(x.words), bool)
    for i in range(n):
        inside[i : i + len(begins)] |= begins
    return x.lengths[inside].sum() / x.lengths.sum()


STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
LETTER, DOTS, BULLETS = re.compile(r"[^\W\d_]"), ("...", "…"), ("- ", "* ", "•")
# (name, what it measures, least, most), in this order. Gopher, arXiv 2112.11446, appendix A.1.1;
# from "repeated lines" on, its table A1.
RULES = [
    ("words", lambda x: len(x.tokens), 50, 100_000),
    ("mean word length", lambda x: sum(map(len, x.tokens)) / len(x.tokens), 3, 10),
    ("hash signs per word", lambda x: x.text.count("#") / len(x.tokens), 0, 0.1),
    ("ellipses per word", lambda x: sum(map(x.text.count, DOTS)) / len(x.tokens), 0, 0.1),
    ("lines with a bullet", lambda x: np.mean([y.startswith(BULLETS) for y in x.lines]), 0, 0.9),
    ("lines with an ellipsis", lambda x: np.mean([y.endswith(DOTS) for y in x.lines]), 0, 0.3),
    ("words with a letter", lambda x: np.mean([bool(LETTER.search(y)) for y in x.tokens]), 0.8, 1),
    ("stop words", lambda x: len(STOP_WORDS & {*map(str.lower, x.words)}), 2, len(STOP_WORDS)),
    ("repeated lines", lambda x: repeated(x.lines, one), 0, 0.3),
    ("characters of repeated lines", lambda x: repeated(x.lines), 0, 0.2),
    ("repeated paragraphs", lambda x: repeated(x.text.split("\n\n"), one), 0, 0.3),
    ("characters of repeated paragraphs", lambda x: repeated(x.text.split("\n\n")), 0, 0.2),
]
MOST = {2: 0.2, 3: 0.18, 4: 0.16, 5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}
RULES += [(f"repeated {n}-grams", partial(repeated_grams, n), 0, MOST[n]) for n in MOST]

# --- test sets ------------------------------------------------------------------------------------


def grams_of_tests(files: list, counts: Counter) -> dict[int, np.ndarray]:
    """{n: hashes of the n-grams of test sets, sorted}. The n-grams of a text have one length.
    counts: of the test texts, and of those that are too short to be searched."""
    found = {}
    for path in files:
        for raw in read_documents(path, 0, None):
            hashes = Text(clean(raw, Counter())).hashes
            n = min(LONGEST, len(hashes))
            counts["test texts"] += 1
            counts[f"test texts under {SHORTEST} words, not searched"] += n < SHORTEST
            if n >= SHORTEST:
                found.setdefault(n, []).append(grams(hashes, n))
    return {n: np.unique(np.concatenate(hashes)) for n, hashes in found.items()}


def cuts(x: Text, tests: dict[int, np.ndarray]) -> list[tuple[int, int]]:
    """What is cut out of a document: (first character, end), without overlaps."""
    found, done = [], []
    for n, hashes in tests.items():
        mine = grams(x.hashes, n)
        at = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
        found += [(i, i + n - 1) for i in np.flatnonzero(hashes[at] == mine)]
    places = [word.span() for word in WORD.finditer(x.text)] if found else []
    for i, j in sorted(found):
        before, after = max(0, places[i][0] - MARGIN), places[j][1] + MARGIN
        if done and after < done[-1][1]:
            continue
        start = max(x.text.rfind(mark, 0, before) for mark in ".!?") + 1
        mark = re.compile("[.!?]").search(x.text, after)
        end = mark.end() if mark else len(x.text)
        if done and start <= done[-1][1]:
            done[-1] = (done[-1][0], end)
        else:
            done.append((start, end))
    return done


def sort_out(id: str, text: str, rules: list, tests: dict) -> list[tuple]:
    """What a document becomes: (id, Text, "", "") stays, (id, None, rule, detail) is removed."""
    if not text:
        return [(id, None, "no text", "")]
    x = Text(text)
    for name, measure, least, most in rules:
        if not least <= (value := measure(x)) <= most:
            return [(id, None, name, f"{value:.4g} is not in {least} .. {most}")]
    found = cuts(x, tests)
    if not found:
        return [(id, x, "", "")]
    edges = [0, *sum(found, ()), len(text)]
    pieces = [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2])]
    pieces = [piece for piece in pieces if piece]
    if len(pieces) > MOST_PIECES:
        return [(id, None, "test set, too many pieces", f"{len(pieces)} pieces")]
    out = [(id, None, "test set", f"characters {a} .. {b}") for a, b in found]
    for k, piece in enumerate(pieces):
        if len(piece) < SHORTEST_PIECE:
            out.append((f"{id}:{k}", None, "test set, short piece", f"{len(piece)} characters"))
        else:
            out.append((f"{id}:{k}", Text(piece), "", ""))
    return out
