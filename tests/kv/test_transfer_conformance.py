"""What every KvTransfer promises, between two real processes."""

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from schemas.errors import KvMismatchError, KvTransferFailedError
from services.kv.transfer import KvTransfer
from tests.kv.conftest import PeerProcess
from tests.kv.peer_process import LAYOUT, Pool, make_transfer, pattern

BLOCKS = 64


class Side:
    """Our own agent, connected to a peer."""

    def __init__(self, transport: str, peer: PeerProcess, num_blocks: int = BLOCKS) -> None:
        self.peer = peer
        self.transfer: KvTransfer = make_transfer(transport)
        self.pool = Pool(self.transfer, num_blocks)
        self.pool.fill(seed=1)
        self.blob = self.transfer.register(self.pool.region)
        self.transfer.add_peer("peer", peer.blob, peer.num_blocks)

    def move(self, direction: str, local: list[int], remote: list[int], peer: str = "peer") -> None:
        handle = self.transfer.post(direction, peer, np.array(local), np.array(remote))
        deadline = time.monotonic() + 10
        while not self.transfer.poll(handle):
            assert time.monotonic() < deadline
            time.sleep(0.0002)


@pytest.fixture(params=["shm", "nixl"], scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def standing(transport: str) -> Iterator[Side]:
    """One pair of processes for all tests that kill nobody."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    peer = PeerProcess(transport, BLOCKS, {})
    yield Side(transport, peer)
    peer.close()


@pytest.fixture
def side(standing: Side) -> Side:
    standing.pool.fill(seed=1)
    standing.peer.do("fill", seed=2)
    standing.transfer.add_peer("peer", standing.peer.blob, BLOCKS)
    return standing


@pytest.fixture
def peer(side: Side) -> PeerProcess:
    return side.peer


def test_a_read_brings_the_named_blocks_and_touches_no_others(side):
    ours, theirs = pattern(1, BLOCKS), pattern(2, BLOCKS)
    order = np.random.default_rng(3)
    for count in (1, 2, 17, BLOCKS):
        side.pool.rows[:] = ours
        local, remote = order.permutation(BLOCKS)[:count], order.permutation(BLOCKS)[:count]
        side.move("read", list(local), list(remote))
        want = ours.copy()
        want[:, local] = theirs[:, remote]
        assert np.array_equal(side.pool.rows, want)


def test_a_write_puts_the_named_blocks_and_touches_no_others(side, peer):
    side.move("write", [5, 9, 63], [0, 40, 7])
    for remote, local in ((0, 5), (40, 9), (7, 63)):
        assert peer.block(remote) == side.pool.rows[:, local].tobytes()
    for untouched in (1, 6, 8, 39, 63):
        assert peer.block(untouched) == pattern(2, BLOCKS)[:, untouched].tobytes()
    assert np.array_equal(side.pool.rows, pattern(1, BLOCKS))


def test_both_may_ask_the_other(side, peer):
    peer.do("add", name="us", blob=base64.b64encode(side.blob).decode(), num_blocks=BLOCKS)
    peer.do("post", direction="read", peer="us", local=[3], remote=[4], wait=True)
    assert peer.block(3) == pattern(1, BLOCKS)[:, 4].tobytes()
    peer.do("post", direction="write", peer="us", local=[8], remote=[11], wait=True)
    assert side.pool.rows[:, 11].tobytes() == pattern(2, BLOCKS)[:, 8].tobytes()


def test_several_transfers_may_be_under_way(side):
    handles = [side.transfer.post("read", "peer", np.array([i]), np.array([63 - i])) for i in range(32)]
    deadline = time.monotonic() + 10
    while handles:
        assert time.monotonic() < deadline
        handles = [handle for handle in handles if not side.transfer.poll(handle)]
    assert np.array_equal(side.pool.rows[:, :32], pattern(2, BLOCKS)[:, 63:31:-1])


@pytest.mark.parametrize(
    ("local", "remote"),
    [([64], [0]), ([0], [64]), ([-1], [0]), ([0], [-1]), ([0, 1], [0]), ([10**6], [0]), ([[0]], [[0]])],
)
def test_blocks_outside_a_pool_are_refused_and_nothing_moves(side, peer, local, remote):
    with pytest.raises(KvTransferFailedError):
        side.transfer.post("read", "peer", np.array(local), np.array(remote))
    with pytest.raises(KvTransferFailedError):
        side.transfer.post("write", "peer", np.array(local), np.array(remote))
    assert np.array_equal(side.pool.rows, pattern(1, BLOCKS))
    side.move("read", [0], [0])


def test_unknown_and_removed_peers_are_refused(side):
    with pytest.raises(KvTransferFailedError):
        side.move("read", [0], [0], peer="stranger")
    side.transfer.remove_peer("peer")
    side.transfer.remove_peer("peer")
    with pytest.raises(KvTransferFailedError):
        side.move("read", [0], [0])


def test_a_damaged_blob_is_refused_and_the_process_lives(side, peer):
    blob = peer.blob
    damaged = [blob[:cut] for cut in range(0, len(blob), 41)]
    for place in range(0, len(blob), 13):
        flipped = bytearray(blob)
        flipped[place] ^= 1 + place % 255
        damaged.append(bytes(flipped))
    damaged += [b"", b"\x00" * 400, blob + b"x", blob * 2, b"{}", b"x" * (2 << 20)]
    for bad in damaged:
        with pytest.raises(KvMismatchError):
            side.transfer.add_peer("bad", bad, BLOCKS)
    with pytest.raises(KvMismatchError):
        side.transfer.add_peer("bad", blob, BLOCKS + 1)
    side.move("read", [0], [1])
    assert side.pool.rows[:, 0].tobytes() == pattern(2, BLOCKS)[:, 1].tobytes()


def test_a_peer_of_another_layout_or_transport_is_refused(transport, side):
    other = make_transfer(transport)
    layout = msgspec.structs.replace(LAYOUT, block_size=8)
    pool = Pool(other, 4, layout)
    with pytest.raises(KvMismatchError):
        side.transfer.add_peer("other", other.register(pool.region), 4)
    foreign = make_transfer("shm" if transport == "nixl" else "nixl")
    with pytest.raises(KvMismatchError):
        side.transfer.add_peer("foreign", foreign.register(Pool(foreign, 4).region), 4)


def test_a_killed_peer_is_an_error_and_its_successor_of_the_same_name_works(transport, start_peer):
    peer = start_peer(transport, BLOCKS)
    side = Side(transport, peer)
    side.move("read", [0], [0])
    peer.kill()
    with pytest.raises(KvTransferFailedError):
        side.move("read", [1], [1])
    successor = start_peer(transport, BLOCKS)
    successor.do("fill", seed=5)
    side.transfer.add_peer("peer", successor.blob, BLOCKS)
    side.move("read", [1], [2])
    assert side.pool.rows[:, 1].tobytes() == pattern(5, BLOCKS)[:, 2].tobytes()


def test_a_removed_peer_that_comes_back_unchanged_works_again(side, peer):
    for _ in range(3):
        side.transfer.remove_peer("peer")
        side.transfer.add_peer("peer", peer.blob, BLOCKS)
        side.move("read", [1], [2])
    assert side.pool.rows[:, 1].tobytes() == pattern(2, BLOCKS)[:, 2].tobytes()


def test_warming_a_peer_up_touches_no_block(side):
    handle = side.transfer.warm("peer")
    deadline = time.monotonic() + 10
    while handle is not None and not side.transfer.poll(handle):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    assert np.array_equal(side.pool.rows, pattern(1, BLOCKS))
    assert side.transfer.warm("stranger") is None


def test_shared_memory_has_no_name_that_could_outlive_its_process(start_peer):
    before = set(os.listdir("/dev/shm"))
    peer = start_peer("shm", BLOCKS)
    side = Side("shm", peer)
    side.move("read", [0], [0])
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "busway" in name]
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert any(link.startswith("/memfd:busway-kv") for link in links)
    peer.kill()
    assert not Path(f"/proc/{peer.pid}").exists()
