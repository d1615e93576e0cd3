"""Work that all ranks do at the same time, each its share.

The results go to every rank, and so does an error: the first failing rank's error is raised on all
ranks. Otherwise a healthy rank would wait forever for one that has left.

                     rank 0         rank 1         rank 2
    each(f, items)   f(0), f(3)     f(1), f(4)     f(2)         all ranks: [f(0), ..., f(4)]
    on_first(f)      f()            waits          waits        all ranks: f()

Processes talk through one function, `exchange(object)`, which returns every rank's object on every
rank (torch.distributed's `all_gather_object`). All ranks make the same calls in the same order.
"""


class Lockstep:
    def __init__(self, exchange, rank: int, world: int):
        self.exchange = exchange
        self.rank = rank
        self.world = world

    def __call__(self, work) -> list:
        """What `work()` returned on each rank. Raises the first failing rank's error."""
        result = None
        error = None
        try:
            result = work()
        except Exception as e:
            error = e
        # This also makes the ranks wait for each other.
        outcomes = self.exchange((result, error))
        for _, error in outcomes:
            if error:
                raise error
        return [result for result, _ in outcomes]

    def on_first(self, work):
        """What `work()` returned on rank 0. The other ranks do nothing but wait."""
        return self(lambda: work() if self.rank == 0 else None)[0]

    def each(self, work, items: list) -> list:
        """[work(item) for item in items] on every rank, computed in shares."""
        shares = self(lambda: [work(item) for item in items[self.rank :: self.world]])
        return [shares[i % self.world][i // self.world] for i in range(len(items))]
