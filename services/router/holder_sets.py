"""Sets of workers, each different one kept once. Pure. Number EMPTY is for slots without a block.

Blocks of one prefix are held by the same workers, so that millions of blocks share a handful of sets: a block keeps a
set's number, and a whole worker is forgotten by rewriting the sets, not the blocks.
"""

from schemas.ids import WorkerId

EMPTY = 0


class Bits:
    """One bit for each worker; a worker that is gone leaves its bit to the next."""

    def __init__(self) -> None:
        self._bits: dict[WorkerId, int] = {}
        self._workers: list[WorkerId | None] = []

    def bit(self, worker: WorkerId) -> int:
        """Return a worker's bit, 0 for one that has none."""
        return self._bits.get(worker, 0)

    def enrol(self, worker: WorkerId) -> int:
        """Return a worker's bit, giving it one if it has none."""
        if worker not in self._bits:
            index = next((i for i, one in enumerate(self._workers) if one is None), len(self._workers))
            if index == len(self._workers):
                self._workers.append(None)
            self._workers[index] = worker
            self._bits[worker] = 1 << index
        return self._bits[worker]

    def free(self, worker: WorkerId) -> None:
        """Take a worker's bit, which must not be in use any more."""
        bit = self._bits.pop(worker, 0)
        if bit:
            self._workers[bit.bit_length() - 1] = None

    def workers(self, mask: int) -> list[WorkerId]:
        """Return the workers of these bits."""
        found = []
        while mask:
            low = mask & -mask
            worker = self._workers[low.bit_length() - 1]
            assert worker is not None
            found.append(worker)
            mask ^= low
        return found


class HolderSets:
    """Sets by number, with the count of blocks that use each. A set is the bits of an int, one bit a worker.

    A set whose last worker was cleared keeps its number until its blocks are dropped or stored anew.
    """

    def __init__(self) -> None:
        self._masks = [0]
        self._counts = [0]
        self._numbers: dict[int, int] = {}
        self._free_numbers: list[int] = []
        self.bits = Bits()

    def __len__(self) -> int:
        return len(self._masks) - 1 - len(self._free_numbers)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that anybody holds."""
        return sum(count for mask, count in zip(self._masks, self._counts, strict=True) if mask)

    def mask(self, number: int) -> int:
        """Return a set's bits."""
        return self._masks[number]

    def add(self, mask: int, num_blocks: int) -> int:
        """Count `num_blocks` blocks more of the set of these bits (not the empty one); return its number."""
        number = self._number(mask)
        self._counts[number] += num_blocks
        return number

    def drop(self, number: int, num_blocks: int) -> None:
        """`num_blocks` blocks of a set (not EMPTY) have it no longer."""
        self._counts[number] -= num_blocks
        if self._counts[number] == 0:
            mask = self._masks[number]
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            self._masks[number] = 0
            self._free_numbers.append(number)

    def clear(self, worker: WorkerId) -> None:
        """Take a worker out of every set; sets that become equal keep their numbers."""
        bit = self.bits.bit(worker)
        for number, mask in enumerate(self._masks):
            if mask & bit:
                if self._numbers.get(mask) == number:
                    del self._numbers[mask]
                self._masks[number] = mask & ~bit
                if mask & ~bit:
                    self._numbers.setdefault(mask & ~bit, number)

    def forget(self, worker: WorkerId) -> None:
        """Take a worker out of every set and free its bit."""
        self.clear(worker)
        self.bits.free(worker)

    def _number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
                self._counts.append(0)
            self._numbers[mask] = number
        return number
