"""In which language is a snippet of 64 characters? The task that prompt_tuning.py and
fine_tuning.py learn.

Python comes from the standard library; C++, CMake, SVG and English (package descriptions) from the
packages that requirements.txt installs. Files are split, so that no test snippet comes from a file
that was trained on. Each language has as many snippets as the others.
"""

import random
import sysconfig
from pathlib import Path

import torch

from corpus import documents

SITE = Path(torch.__file__).parent.parent
# letter: (folder, files)
LANGUAGES = {
    "P": (Path(sysconfig.get_path("stdlib")), "*.py"),
    "C": (SITE / "torch" / "include", "*.h"),
    "M": (SITE / "torch" / "share", "*.cmake"),
    "S": (SITE / "matplotlib", "*.svg"),
    "E": (SITE, "*.dist-info/METADATA"),
}
TASK = "language"
# characters of a snippet
LENGTH = 64
# snippets: (training, test)
SIZES = (2000, 300)
TOY_SIZES = (20, 5)


def texts_of(letter: str, generator: random.Random) -> list[str]:
    """The beginnings, up to 20,000 characters, of at most 200 files in a language."""
    folder, pattern = LANGUAGES[letter]
    files = documents.standard_library() if letter == "P" else sorted(folder.rglob(pattern))
    files = [file for file in files if file.stat().st_size > 800]
    generator.shuffle(files)
    return [file.read_text(errors="ignore")[:20000] for file in files[:200]]


def draw_lines(texts: list[str], letter: str, n: int, generator: random.Random) -> list[dict]:
    """n snippets that begin with a line, most of each not blank. A text is drawn by its length."""
    lines = []
    while len(lines) < n:
        text = generator.choices(texts, [len(t) for t in texts])[0]
        position = generator.randrange(max(1, len(text) - LENGTH))
        begin = text.rfind("\n", 0, position) + 1
        snippet = text[begin : begin + LENGTH]
        if len(snippet.strip()) >= 0.6 * LENGTH:
            lines.append({"taskname": TASK, "snippet": snippet, "label": letter})
    return lines


def snippets(sizes: tuple[int, int], seed: int = 0) -> tuple[list[dict], list[dict]]:
    """(training, test) lines, in random order. Every fourth file of a language is for the test."""
    generator = random.Random(seed)
    training = []
    test = []
    for letter in LANGUAGES:
        texts = texts_of(letter, generator)
        to_train = [text for i, text in enumerate(texts) if i % 4]
        training += draw_lines(to_train, letter, sizes[0] // len(LANGUAGES), generator)
        test += draw_lines(texts[::4], letter, sizes[1] // len(LANGUAGES), generator)
    generator.shuffle(training)
    generator.shuffle(test)
    return training, test
