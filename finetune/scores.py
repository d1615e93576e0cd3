"""How near answers and labels are to the right ones. n, m: words of the two texts.

    exact match    equal words
    F1             2 common / (n + m); a word counts as often as both texts have it
    ROUGE-L        2 lcs / (n + m), lcs: the longest sequence of words that both have in order
    macro F1       the mean over all labels of 2 both / (found + right)

Exact match and F1 are SQuAD's (arXiv 1606.05250, section 6.1): lower case, no punctuation, no
articles. ROUGE-L (Lin 2004, section 3, with β = 1) has the words of the package rouge_score: runs
of a to z and 0 to 9, in lower case.

Not covered: several right answers, stems, ROUGE-L by sentences.
"""

import re
import string
from collections import Counter

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def of_answer(found: str | None, right: str) -> dict[str, float]:
    """found: None where there is no answer."""
    if found is None:
        return dict.fromkeys(("exact_match", "f1", "rouge_l"), 0.0)
    a, b = (
        re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split()
        for text in (found, right)
    )
    f1 = f1_of((Counter(a) & Counter(b)).total(), a, b) if a or b else 1.0
    words = [re.findall("[a-z0-9]+", text.lower()) for text in (found, right)]
    rouge_l = f1_of(longest_common(*words), *words)
    return {"exact_match": float(a == b), "f1": f1, "rouge_l": rouge_l}


def f1_of(common: int, a: list, b: list) -> float:
    """The harmonic mean of precision, common / |a|, and recall, common / |b|."""
    return 2 * common / (len(a) + len(b)) if common else 0.0


def longest_common(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence, in |a| |b| steps."""
    row = [0] * (len(b) + 1)
    for word in a:
        above, row = row, [0]
        for j, other in enumerate(b):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
    return row[-1]


def macro_f1(found: list[str], right: list[str]) -> float:
    both = Counter(a for a, b in zip(found, right) if a == b)
    either = Counter(found) + Counter(right)
    return sum(2 * both[label] / count for label, count in either.items()) / len(either)


def mean(scores: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in scores) / len(scores) for name in scores[0]}
