"""Curation of text: near-duplicates beside brute force and the formula, test sets cut out to the
character, rules, repairs; the same bytes from any number of processes and after kills."""

import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from parity import again

from run import cleaning, curate
from run.documents import find_files, read_documents

ROOT = Path(__file__).parent.parent


# --- near-duplicates ------------------------------------------------------------------------------


def pairs_of_similarity(s: float, count: int, words: int = 84) -> list[str]:
    """Two documents after each other share their first words; no two pairs share a word."""
    shingles = words - 4
    common = round(2 * shingles * s / (1 + s)) + 4
    texts = []
    for pair in range(count):
        own = [f"W{s}x{pair}x{i}" for i in range(2 * words)]
        texts += [" ".join(own[:words]), " ".join(own[:common] + own[words : 2 * words - common])]
    return texts


def shingles_as_words(text: str) -> set[tuple]:
    words = re.findall("[a-z0-9]+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def brute_force(texts: list[str], threshold: float) -> dict[int, int]:
    """{later document: earlier one} of all pairs; here a document is in one pair at most."""
    sets = [shingles_as_words(text) for text in texts]
    near = {}
    for i, j in itertools.combinations(range(len(sets)), 2):
        both = len(sets[i] & sets[j])
        if both >= threshold * (len(sets[i]) + len(sets[j]) - both):
            near[j] = i
    return near


def quantile(n: int, p: float, tail: float) -> int:
    """The largest k with P[Binomial(n, p) < k] <= tail."""
    below = 0.0
    for k in range(n + 1):
        below += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if below > tail:
            return k
    return n


def found_of(texts: list[str], threshold: float, b: int, r: int) -> dict[int, int]:
    shingles = [cleaning.Text(text).shingles for text in texts]
    keys = np.array([curate.band_keys(x, b, r) for x in shingles]).T
    return curate.near_duplicates(shingles, keys, threshold)


def check_recall(s: float, b: int, r: int, n: int = 120) -> None:
    """Of n pairs as many are found as the formula says, to chances of 1 in 10^6."""
    p = curate.meets(s, b, r)
    texts = pairs_of_similarity(s, n)
    found = found_of(texts, s - 0.05, b, r)
    assert found.items() <= {i + 1: i for i in range(0, 2 * n, 2)}.items()
    least, most = quantile(n, p, 5e-7), n - quantile(n, 1 - p, 5e-7)
    assert least <= len(found) <= most, (len(found), n * p)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.85])
def test_precision_and_recall_beside_brute_force(threshold):
    """At the threshold nearly all are found, above it too; below it none, and no wrong pair."""
    b, r = curate.choose_bands(threshold)
    texts = []
    for s in (threshold - 0.04, threshold + 0.015, threshold + 0.1):
        texts += pairs_of_similarity(s, 20)
    near = brute_force(texts, threshold)
    assert sorted(near) == [*range(41, 120, 2)]
    found = found_of(texts, threshold, b, r)
    assert found.items() <= near.items()
    least = quantile(len(near), curate.meets(threshold, b, r), 1e-6)
    assert least > 0.7 * len(near) and len(found) >= least


@pytest.mark.parametrize("s", [0.5, 0.65, 0.8])
def test_recall_is_that_of_the_formula(s):
    check_recall(s, 18, 7)


def longer_bands(keys):
    return lambda x, b, r: keys(x, b // 2, 2 * r)


def one_band(keys):
    return lambda x, b, r: keys(x, 1, r)


def no_permutations(keys):
    def same(x, b, r):
        h = (x >> np.uint64(33)).min()
        return np.full(b, h, np.uint64)

    return same


@pytest.mark.parametrize(
    "wrong, s", [(longer_bands, 0.65), (one_band, 0.65), (no_permutations, 0.5)]
)
def test_wrong_bands_are_seen(wrong, s, monkeypatch):
    monkeypatch.setattr(curate, "band_keys", wrong(curate.band_keys))
    with pytest.raises(AssertionError):
        check_recall(s, 18, 7)


def test_no_comparison_is_seen(monkeypatch):
    monkeypatch.setattr(curate, "jaccard", lambda x, y: 1.0)
    with pytest.raises(AssertionError):
        test_precision_and_recall_beside_brute_force(0.5)


def test_the_first_of_a_connected_group_stays():
    """By hand: a is near b, b near c, a not near c; copies join; who is alone is not named."""
    sets = [np.arange(i, i + 10, dtype=np.uint64) for i in (0, 50, 2, 1, 50, 2, 90)]
    met = [np.zeros(7, np.uint64)]
    assert curate.near_duplicates(sets, met, 0.8) == {2: 0, 3: 0, 4: 1, 5: 0}
    assert curate.near_duplicates(sets[::-1], met * 2, 0.8) == {3: 1, 4: 1, 5: 2, 6: 1}
    # (0, 2) have 8 / 12, which is enough
    assert curate.near_duplicates([sets[0], sets[2]], [met[0][:2]], 8 / 12) == {1: 0}
    assert curate.near_duplicates([sets[0], sets[2]], [met[0][:2]], 0.67) == {}
    # 2 is near 1, and by another band 1 near 0: the first one is 0
    bands = [np.array([0, 1, 1], np.uint64), np.array([0, 0, 1], np.uint64)]
    assert curate.near_duplicates([sets[0], sets[3], sets[2]], bands, 0.8) == {1: 0, 2: 0}
    assert curate.near_duplicates(sets, [np.arange(7, dtype=np.uint64)], 0.8) == {}
    assert curate.near_duplicates([], [np.zeros(0, np.uint64)], 0.8) == {}


def test_of_many_copies_few_are_compared(monkeypatch):
    """One comparison for each copy, not one for each pair; later bands need none."""
    compared = []
    jaccard = curate.jaccard
    monkeypatch.setattr(curate, "jaccard", lambda x, y: compared.append(1) or jaccard(x, y))
    copies = [np.arange(9, dtype=np.uint64)] * 400
    found = curate.near_duplicates(copies, [np.zeros(400, np.uint64)] * 3, 0.8)
    assert found == dict.fromkeys(range(1, 400), 0) and len(compared) == 399


def test_bands():
    """By hand: 0.8^7 = 0.2097, 1 - 0.7903^18 = 0.986; r = 8 would give 0.947."""
    assert curate.choose_bands(0.8) == (18, 7)
    assert curate.meets(0.8, 18, 7) == pytest.approx(0.98554, abs=1e-5)
    assert curate.meets(0.8, 16, 8) < 0.95
    assert curate.choose_bands(1.0) == (1, 128)


# --- one document ---------------------------------------------------------------------------------


@cache
def prose(words: int, seed: int = 0) -> str:
    """Words that are nearly all different, of which one in eight is a stop word, in sentences."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    text = []
    for i in range(words):
        word = "".join(letters[random.integers(26, size=int(random.integers(4, 8)))])
        text.append(["the", "of", "and", "to"][i // 8 % 4] if i % 8 == 0 else word)
        text[-1] += "." if i % 12 == 11 else ""
    return " ".join(text)


def with_repeated(share: float) -> str:
    """A passage twice, so that a share of the characters stood before."""
    passage = prose(int(1000 * share), 1).replace(".", "")
    rest = prose(1000 - 2 * int(1000 * share), 2)
    return f"{passage} {rest[: len(rest) // 2]} {passage} {rest[len(rest) // 2 :]}"


def with_top(n: int, times: int) -> str:
    gram = " ".join(["quaternion", "laboratory", "mathematic", "understand"][:n])
    words = prose(120, 3).split()
    for i in range(times):
        words.insert(i * (len(words) // times), gram)
    return " ".join(words)


OTHER_STOP_WORDS = cleaning.STOP_WORDS - {"the"}
LINES = [prose(12, i) for i in range(10)]
BROKEN = {
    "words": "the and " * 24,
    "mean word length": "I a of to " * 20,
    "hash signs per word": prose(60) + " #tag" * 8,
    "ellipses per word": prose(60) + " so ... on" * 9,
    "lines with a bullet": "\n".join("- " + line for line in LINES),
    "lines with an ellipsis": "\n".join(LINES[:6] + [line + "..." for line in LINES[6:]]),
    "words with a letter": prose(60) + " 12" * 20,
    "stop words": " ".join({word: 0 for word in prose(90).split() if word not in OTHER_STOP_WORDS}),
    "repeated lines": "\n".join(LINES + ["so it is"] * 6),
    "characters of repeated lines": "\n".join(LINES + [prose(60, 5)] * 2),
    "repeated paragraphs": "\n".join(LINES) + "\n\n" + "\n\n".join(["so it is"] * 3),
    "characters of repeated paragraphs": "\n\n".join(LINES + [prose(60, 5)] * 2),
    "repeated 2-grams": with_top(2, 8),
    "repeated 3-grams": with_top(3, 6),
    "repeated 4-grams": with_top(4, 4),
    **{f"repeated {n}-grams": with_repeated(0.205 - n / 100) for n in range(5, 11)},
}


@pytest.mark.parametrize("name", [name for name, *_ in cleaning.RULES])
def test_rules(name):
    """Prose breaks none. Each rule is the first that its text breaks (but paragraphs are lines)."""
    assert not broken_rules(prose(300))
    broken = broken_rules(BROKEN[name])
    assert name in broken[:2] and (name == broken[0] or "paragraphs" in name), broken
    ((_, _, rule, detail),) = cleaning.sort_out("a", BROKEN[name], cleaning.RULES, {})
    assert rule == broken[0] and re.fullmatch(r"[\d.]+ is not in [\d.]+ \.\. \d+\S*", detail)
    assert cleaning.sort_out("a", BROKEN[name], [], {})[0][1].text == BROKEN[name]


def test_bold_is_no_bullet():
    assert not broken_rules("\n".join("**" + line.replace(" ", "** ", 1) for line in LINES))
    for bullet in ("* ", "•"):
        assert broken_rules("\n".join(bullet + line for line in LINES)) == ["lines with a bullet"]


def broken_rules(text: str) -> list[str]:
    x = cleaning.Text(text)
    return [name for name, measure, low, high in cleaning.RULES if not low <= measure(x) <= high]


def test_shares_of_characters():
    """By hand: in "ab cd ab cd ef" the top 2-gram covers 8 of 10; one 2-gram, 4, stood before."""
    x = cleaning.Text("ab cd ab cd ef")
    assert cleaning.repeated_grams(2, x) == 0.8
    assert cleaning.repeated_grams(3, x) == 0
    assert cleaning.repeated_grams(9, x) == 0
    y = cleaning.Text("a b c d e f a b c d e f g")
    assert cleaning.repeated_grams(5, y) == pytest.approx(6 / 13)
    assert cleaning.repeated(["aa", "b", "aa", "aa"]) == pytest.approx(4 / 7)
    assert cleaning.repeated(["aa", "b", "aa", "aa"], cleaning.one) == 0.5


@pytest.mark.parametrize(
    "raw, fixed, steps",
    [
        ("plain\n\ttext", "plain\n\ttext", set()),
        ("It doesn\u00e2\u20ac\u2122t.", "It doesn\u2019t.", {"repaired"}),
        ("a \r\nb\rc", "a\nb\nc", {"repaired", "white space"}),
        ("e\u0301", "\u00e9", {"repaired"}),
        ("a\x00b\ufeffc", "abc", {"repaired"}),
        ("cap\u00adital", "capital", {"repaired"}),
        ("\n\n  a  \n\n\n\nb\n", "  a\n\nb", {"white space"}),
        ("\u201cdon\u2019t\u201d &lt; \ufb01", "\u201cdon\u2019t\u201d &lt; \ufb01", set()),
        ("", "", set()),
    ],
)
def test_clean(raw, fixed, steps):
    counts = Counter()
    assert cleaning.clean(raw, counts) == fixed
    assert set(+counts) == {f"changed: {step}" for step in steps}
    assert cleaning.clean(fixed, Counter()) == fixed


# --- test sets ------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def grams_of(texts: list[str]) -> set[tuple]:
    """13-grams of test texts; all of a text of 8 to 12 words."""
    found = set()
    for words in map(words_of, texts):
        n = min(13, len(words))
        if n >= 8:
            found |= {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
    return found


def left_by_hand(text: str, grams: set[tuple]) -> list[str]:
    """Character by character: what is not within 200 characters and a sentence of an n-gram."""
    places = [(word.start(), word.end()) for word in re.finditer("[A-Za-z0-9]+", text)]
    words = words_of(text)
    gone = bytearray(len(text))
    for n in range(8, 14):
        for i in range(len(words) - n + 1):
            if tuple(words[i : i + n]) in grams:
                start, end = max(0, places[i][0] - 200), places[i + n - 1][1] + 200
                while start > 0 and text[start - 1] not in ".!?":
                    start -= 1
                while end < len(text) and text[end] not in ".!?":
                    end += 1
                gone[start : end + 1] = b"\1" * (min(end + 1, len(text)) - start)
    runs = itertools.groupby(range(len(text)), key=gone.__getitem__)
    pieces = ["".join(text[i] for i in run).strip() for cut, run in runs if not cut]
    return [piece for piece in pieces if len(piece) >= 200]


def planted(seed: int, tests: list[str]) -> str:
    """Prose with some of the test texts in it, without case and with other punctuation. Of the
    longest it also has 12 words, which is not enough."""
    words = prose(500, seed).split() + tests[0].split()[:12]
    random = np.random.default_rng(seed)
    for at in random.integers(500, size=seed % 4):
        chosen = tests[random.integers(len(tests))].upper().split()
        words[at:at] = [", ".join(chosen)]
    return " ".join(words)


TESTS = [prose(words, 1000 + words) for words in (30, 20, 13, 12, 8)]
NO_TESTS = [prose(7, 1), "to be", ""]


def save_tests(path: Path, texts: list[str]) -> dict:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return cleaning.grams_of_tests([path], Counter())


def check_test_sets(folder: Path) -> None:
    """All n-grams that were planted are cut out, and what is left is as if cut by hand."""
    tests = save_tests(folder / "tests.jsonl", TESTS + NO_TESTS)
    grams = grams_of(TESTS)
    cut = 0
    for seed in range(16):
        text = planted(seed, TESTS)
        kept = [x.text for _, x, *_ in cleaning.sort_out("a", text, [], tests) if x]
        for piece in kept:
            assert not grams & {
                g for n in range(8, 14) for g in zip(*(words_of(piece)[i:] for i in range(n)))
            }
        assert kept == (left_by_hand(text, grams) if seed % 4 else [text])
        cut += kept != [text]
    assert cut == 12


def test_planted_test_sets_are_cut_out_and_nothing_else(tmp_path):
    check_test_sets(tmp_path)


def test_a_cut_inside_another(tmp_path):
    """The 8 words end 200 characters before a sentence does; the 13 words around them do not."""
    texts = [TESTS[2], " ".join(words_of(TESTS[2])[2:10])]
    tests = save_tests(tmp_path / "tests.jsonl", texts)
    text = f"{prose(90, 1)} {TESTS[2]} {'y ' * 95}. {'z ' * 60}. {prose(90, 2)}"
    kept = [x.text for _, x, *_ in cleaning.sort_out("a", text, [], tests) if x]
    assert kept == left_by_hand(text, grams_of(texts))


@pytest.mark.parametrize("name, value", [("MARGIN", 150), ("SHORTEST", 9), ("LONGEST", 11)])
def test_other_cuts_are_seen(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr(cleaning, name, value)
    with pytest.raises(AssertionError):
        check_test_sets(tmp_path)


def test_pieces(tmp_path):
    """A document in more than 10 pieces is removed, as is one that is all test text."""
    tests = save_tests(tmp_path / "tests.jsonl", TESTS)
    for count, rule in ((9, ""), (10, "test set, too many pieces")):
        text = " ".join(f"{prose(120, i)} {TESTS[2]}." for i in range(count)) + " " + prose(120, 99)
        # Nothing is left of these, so they are no pieces.
        text = f"{TESTS[2]}. {text} {TESTS[2]}."
        results = cleaning.sort_out("a", text, [], tests)
        assert {name for _, x, name, _ in results if x is None} == {rule or "test set"}
        assert [id for id, x, *_ in results if x] == [f"a:{i}" for i in range(10)] * (not rule)
    removed = cleaning.sort_out("b", TESTS[0], [], tests)
    assert removed == [("b", None, "test set", f"characters 0 .. {len(TESTS[0])}")]
    text = f"Short. {prose(40, 7)} {TESTS[1]} {prose(90, 8)}"
    (short,) = [
        result for result in cleaning.sort_out("c", text, [], tests) if "short" in result[2]
    ]
    assert short == ("c:0", None, "test set, short piece", "6 characters")


# --- the command ----------------------------------------------------------------------------------


def make_input(folder: Path) -> tuple[Path, Path]:
    """(IN, a test set): five files in several parts, copies and near-copies, planted test texts."""
    source = folder / "in"
    (source / "more").mkdir(parents=True)
    for name in range(4):
        texts = [planted(3 * name + i, TESTS) for i in range(3)]
        texts += [prose(200), prose(200).replace("q", "Q"), "too short", prose(190)]
        lines = [json.dumps({"text": text, "url": "left out"}) for text in texts]
        (source / f"{name}.jsonl").write_text("\r\n".join(lines))
    (source / "more" / "z.txt").write_text(prose(300, 77) + "  \r\n")
    tests = folder / "tests.jsonl"
    save_tests(tests, TESTS)
    return source, tests


def run(folder: Path, name: str, *flags) -> dict[str, bytes]:
    """Curate folder/in into folder/NAME. What it wrote: {file: bytes}."""
    curate.main([*map(str, (folder / "in", folder / name, *flags))])
    return written(folder, name)


def written(folder: Path, name: str) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {
        file.replace(name, "OUT", 1): data for file, data in files.items() if file.startswith(name)
    }


@pytest.fixture
def flags(tmp_path, monkeypatch) -> list:
    monkeypatch.setattr(curate, "PART_BYTES", 2**14)
    _, tests = make_input(tmp_path)
    return ["--test-sets", tests, "--workers", 1]


def test_what_is_written(flags, tmp_path, capsys):
    """train.py --data OUT reads the documents; every other one is in removed.jsonl, with the
    reason; the report counts them."""
    files = run(tmp_path, "a", *flags)
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(files.pop("OUT.report.json")) and report["bands"] == [18, 7]
    removed = [json.loads(line) for line in files.pop("OUT.removed.jsonl").splitlines()]
    assert all(path.startswith("OUT/") for path in files) and len(files) >= 4
    kept = [json.loads(line) for data in files.values() for line in data.splitlines()]
    read = [x for path in find_files([str(tmp_path / "a")]) for x in read_documents(path, 0, None)]
    assert read == [row["text"] for row in kept]
    ids = [row["id"] for row in kept] + list(dict.fromkeys(row["id"] for row in removed))
    assert len(set(ids)) == len(ids) and set(kept[0]) == {"id", "text"}
    assert {id.split(".jsonl")[0].split(".txt")[0] for id in ids} == {
        str(tmp_path / "in" / name) for name in ("0", "1", "2", "3", "more/z")
    }
    rules = Counter(row["rule"] for row in removed)
    assert {f"removed: {rule}": n for rule, n in rules.items()}.items() <= report.items()
    assert report["documents in"] == 29 and report["documents out"] == len(kept)
    # of each file four copies, of which the first file's first stays
    assert rules["near-duplicate"] == 11 and rules["words"] == 4
    near = {row["detail"] for row in removed if row["rule"] == "near-duplicate"}
    assert near == {row["id"] for row in kept if row["text"] == prose(200)}
    assert prose(300, 77) in read and report["changed: white space"] == 1
    grams = grams_of(TESTS)
    assert not any(grams & {*zip(*(words_of(text)[i:] for i in range(13)))} for text in read)


def test_same_bytes_from_three_processes(flags, tmp_path):
    one = run(tmp_path, "a", *flags)
    assert run(tmp_path, "b", *flags[:-1], 3) == one


def kill(when: str, name: str, folder: Path, flags: list) -> None:
    """Curate in a child, which kills itself before or after something gets its name."""
    child = os.fork()
    if not child:

        def rename(original, path: Path, target: Path):
            is_it = name in (target.name, "part" if target.parent.name == "b.parts" else "")
            if when == "after" or not is_it:
                original(path, target)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            Path.rename = partialmethod_of(rename, Path.rename)
            run(folder, "b", *flags)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def partialmethod_of(function, original):
    return lambda path, target: function(original, path, target)


STEPS = ("part", "part", "part", "b")


@pytest.mark.parametrize(
    "kills",
    [
        [("before", "part"), ("after", "part"), ("before", "b"), ("after", "b")],
        again([(when, name) for name in STEPS for when in ("before", "after")]),
    ],
)
def test_same_bytes_after_kills(kills, flags, tmp_path):
    """Each run is killed before or after a step counts as done. The last kill is after all are."""
    whole = run(tmp_path, "a", *flags)
    for when, name in kills:
        assert not (tmp_path / "b").exists()
        kill(when, name, tmp_path, flags)
    files = written(tmp_path, "b")
    assert {name: data for name, data in files.items() if "parts/" not in name} == whole


def test_goes_on_with_finished_parts(flags, tmp_path):
    """They are not done again: what stands in one is taken as it is."""
    whole = run(tmp_path, "a", *flags)
    kill("after", "part", tmp_path, flags)
    (part,) = (tmp_path / "b.parts").glob("*/removed.jsonl")
    part.write_bytes(b"kept\n" + part.read_bytes())
    resumed = run(tmp_path, "b", *flags)
    assert resumed["OUT.removed.jsonl"] == b"kept\n" + whole["OUT.removed.jsonl"]
    assert not (tmp_path / "b.parts").exists()


@pytest.mark.parametrize("change", ["--threshold", "--quality", "--test-sets", "IN"])
def test_a_changed_run_begins_anew(change, flags, tmp_path):
    """Parts that another run has finished are not used, nor documents that it wrote."""
    kill("before", "b", tmp_path, flags)
    more = {"--threshold": ["--threshold", 0.7], "--quality": ["--quality", "off"]}.get(change, [])
    if change == "IN":
        first, *others = sorted((tmp_path / "in").glob("*.jsonl"))
        first.write_text(first.read_text().replace("the", "The"))
        for path in others:
            path.write_text(json.dumps({"text": prose(100, 7)}))
    if change == "--test-sets":
        save_tests(flags[1], TESTS[1:])
    changed = run(tmp_path, "b", *flags, *more)
    assert changed == run(tmp_path, "a", *flags, *more)


def test_a_run_goes_on_in_a_process_of_the_same_number(flags, tmp_path, monkeypatch):
    """As in a container, where it is 1: a folder of the killed one is in the way."""
    whole = run(tmp_path, "a", *flags)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    rename = Path.rename
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupt)
        run(tmp_path, "b", *flags)
    assert Path.rename is rename and [*(tmp_path / "b.parts").glob("*.1")]
    assert run(tmp_path, "b", *flags) == whole


def interrupt(path: Path, target: Path) -> None:
    raise KeyboardInterrupt


def test_more_parts_than_a_process_can_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(curate, "PART_BYTES", 1)
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": f"of {i}"}) for i in range(80)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 40, limits[1]))
    try:
        files = run(tmp_path, "a", "--quality", "off", "--workers", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(files) == 82


def test_refusals(flags, tmp_path):
    def refused(words: str, *arguments):
        with pytest.raises(ValueError, match=words):
            curate.main([*map(str, arguments)])

    source, out = tmp_path / "in", tmp_path / "out"
    refused("in/new: lies in .*, which is read; name another OUT", source, source / "new")
    refused("lies in", source, source)
    refused("--workers 0: must be at least 1", source, out, "--workers", 0)
    for threshold in (0, 1.5, -0.9, 0.01, "nan"):
        refused(
            "--threshold .*: such pairs would not meet; give", source, out, "--threshold", threshold
        )
    refused("no such file", tmp_path / "none", out)
    refused("no such file", source, out, "--test-sets", tmp_path / "none")
    refused("cannot be written", source, tmp_path / "tests.jsonl" / "out")
    (tmp_path / "tests.jsonl").write_text('{"question": "who?"}')
    refused("tests.jsonl, line 1.*text", source, out, *flags)
    assert not out.exists()
    (source / "bad.txt").write_bytes(b"caf\xe9")
    (source / "worse.txt").write_bytes(b"\xff")
    refused("not UTF-8 text: .*bad.txt, .*worse.txt; iconv", source, tmp_path / "other")
    refused("exists", source, "/")
    out.mkdir()
    refused("out: exists; remove it, or name another OUT", source, out)


def test_nothing_is_left(tmp_path, capsys):
    """The name of the file is no text, its only test text too short."""
    (tmp_path / "in").mkdir()
    Path(os.fsdecode(bytes(tmp_path / "in") + b"/\xe9.txt")).write_text("too short")
    save_tests(tmp_path / "tests.jsonl", ["to be or not"])
    files = run(tmp_path, "a", "--test-sets", tmp_path / "tests.jsonl")
    out, error = capsys.readouterr()
    assert "0 of 1 documents stay" in error
    report = json.loads(out)
    assert report["test texts"] == report["test texts under 8 words, not searched"] == 1
    assert json.loads(files["OUT.removed.jsonl"])["id"] == f"{tmp_path}/in/\\udce9.txt:0:0"
    assert list(files) == ["OUT.removed.jsonl", "OUT.report.json"] and (tmp_path / "a").is_dir()


@pytest.mark.repetition
def test_kill_of_three_processes(tmp_path):
    """The processes end with the one that started them; the same command goes on."""
    source, tests = make_input(tmp_path)
    code = (
        "import sys; from run import curate; curate.PART_BYTES = 2**14; curate.main(sys.argv[1:])"
    )
    program = [sys.executable, "-c", code, str(source)]
    flags = ["--test-sets", str(tests), "--workers", "3"]
    process = subprocess.Popen(
        [*program, str(tmp_path / "b"), *flags], cwd=ROOT, start_new_session=True
    )
    while not [*(tmp_path / "b.parts").glob("?" * 16)]:
        assert process.poll() is None
    process.kill()
    process.wait()
    assert not (tmp_path / "b").exists()
    deadline = time.monotonic() + 60
    while in_session(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for name in ("a", "b"):
        subprocess.run([*program, str(tmp_path / name), *flags], cwd=ROOT, check=True)
    assert written(tmp_path, "a") == written(tmp_path, "b")


def in_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
