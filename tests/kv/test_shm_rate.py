"""The set rate of shared memory transfers, by a clock of the test's."""

import numpy as np

from services.kv.shm import ShmTransfer
from tests.kv.peer_process import LAYOUT, Pool


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_transfers_take_their_time_one_after_the_other_and_bytes_come_as_it_passes():
    clock = Clock()
    transfer = ShmTransfer(gb_per_s=LAYOUT.block_bytes / 1e9, clock=clock)  # a block a second
    source = ShmTransfer()
    theirs = Pool(source, 8)
    theirs.fill(seed=2)
    ours = Pool(transfer, 8)
    transfer.register(ours.region)
    transfer.add_peer("peer", source.register(theirs.region), 8)
    first = transfer.post("read", "peer", np.arange(4), np.arange(4))
    second = transfer.post("read", "peer", np.arange(4, 6), np.arange(4, 6))
    assert not transfer.poll(first)
    assert not ours.rows.any()
    clock.now += 2.01
    assert not transfer.poll(first)
    assert np.array_equal(ours.rows[:, :2], theirs.rows[:, :2])
    assert not ours.rows[:, 2:].any()
    clock.now += 2
    assert not transfer.poll(second)
    assert transfer.poll(first)
    clock.now += 2
    assert transfer.poll(second)
    assert np.array_equal(ours.rows[:, :6], theirs.rows[:, :6])
