"""A few cases of each kind; `python tests/bad_files.py` runs 200."""

import random

import bad_files
import pytest


@pytest.mark.parametrize("kind", ["index", "config", "prompts", "tokenizer", "metrics", "tokens"])
def test_a_file_that_was_changed_is_refused_in_one_line(kind):
    found = [bad_files.check(kind, seed) for seed in range(12)]
    assert not [problem for _, problem in found if problem]
    # A line of metrics that cannot be read is left out and said, a damaged token cache is built
    # again.
    assert sum(refused for refused, _ in found) >= (3 if kind not in ("metrics", "tokens") else 0)


def test_changes_by_hand():
    """Each case changes something, and the same seed always the same."""
    import json

    data = json.dumps({"a": [1, 2], "b": {"c": "x"}}).encode()
    for change in (bad_files.changed_json, bad_files.changed_bytes, bad_files.changed_line):
        found = [change(data, random.Random(seed)) for seed in range(50)]
        assert (
            found == [change(data, random.Random(seed)) for seed in range(50)]
            and len(set(found)) > 15
            and found.count(data) < 5
        )
    header = (2).to_bytes(8, "little") + b"{}" + b"rest"
    assert all(
        bad_files.changed_header(header, random.Random(seed)).endswith(b"rest")
        for seed in range(20)
    )
