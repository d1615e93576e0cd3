import time

import torch.distributed as dist

from watchdog import Watchdog


def watched(size=1, seconds=0.3, store=None):
    ended = []
    return Watchdog(store or dist.HashStore(), 0, size, seconds, ended.append), ended


def test_a_heart_that_beats():
    dog, ended = watched()
    for step in range(8):
        dog.beat(f"step {step}")
        time.sleep(0.1)
    dog.pause()                                                  # and one that may rest
    time.sleep(1)
    assert not ended
    dog.stop()


def test_a_rank_that_hangs_is_named_with_its_step_and_line(capfd):
    """Rank 1 was heard of in step 6, and does not answer."""
    store = dist.HashStore()
    store.set("beat 1", "step 6")
    dog, ended = watched(2, store=store)
    dog.beat("step 7")
    time.sleep(1)
    dog.stop()
    err = capfd.readouterr().err
    assert ended and ended[0] == 1
    assert "rank 0: step 7, in tests/test_watchdog.py:" in err and "rank 1: does not answer; last heard of in step 6" in err


def test_a_slow_rank_that_goes_on_is_left_alone():
    dog, ended = watched(seconds=0.5)
    dog.beat("step 1")
    time.sleep(0.7)                                              # late, but before all are given up
    dog.beat("step 2")
    time.sleep(0.4)
    dog.pause()
    time.sleep(1)
    assert not ended and not dog.store.check(["waits 0"])
    dog.stop()


class Gone(dist.HashStore):
    """The machine that held the store is gone."""
    def check(self, keys):
        raise RuntimeError("connection refused")


def test_without_the_store_the_rank_ends_all_the_same(capfd):
    dog, ended = watched(store=Gone())
    dog.beat("step 3")
    time.sleep(1)
    dog.stop()
    assert ended and "no word of the others" in capfd.readouterr().err
