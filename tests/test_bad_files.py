"""A few cases of each kind; `python tests/bad_files.py` runs 200."""

import json
import random

import bad_files
import pytest


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.repetition)])
@pytest.mark.parametrize("kind", bad_files.KINDS)
def test_a_file_that_was_changed_is_refused_in_one_line(kind, part):
    # an unreadable line of metrics is skipped with a message, a damaged token cache is built again,
    # and the run goes on, which takes longer
    goes_on = kind in ("metrics", "tokens")
    count = 3 if goes_on else 6
    found = [bad_files.check(kind, seed) for seed in range(part * count, (part + 1) * count)]
    assert not [problem for _, problem in found if problem]
    assert sum(refused for refused, _ in found) >= (0 if goes_on else 2)


def test_changes_by_hand():
    """Each case changes something, and the same seed always the same."""
    data = json.dumps({"a": [1, 2], "b": {"c": "x"}}).encode()
    for change in (bad_files.changed_json, bad_files.changed_bytes, bad_files.changed_line):
        found = [change(data, random.Random(seed)) for seed in range(50)]
        assert found == [change(data, random.Random(seed)) for seed in range(50)]
        assert len(set(found)) > 15
        assert found.count(data) < 5
    header = (2).to_bytes(8, "little") + b"{}" + b"rest"
    assert all(
        bad_files.changed_header(header, random.Random(seed)).endswith(b"rest")
        for seed in range(20)
    )
