"""What changed in the prefix cache since somebody last looked, in the words of schemas.kv_events. Pure."""

from array import array

from schemas.kv_events import KvChange, KvRemoved, KvStored


class CacheLog:
    """Changes in order; neighbours of a kind, and blocks that follow one another, become one change."""

    def __init__(self) -> None:
        self._changes: list[tuple[int | None, array[int]]] = []

    def stored(self, parent: int, name: int) -> None:
        """The block `name`, which follows `parent`, is a prefix hit from now on."""
        if self._changes:
            first_parent, names = self._changes[-1]
            if first_parent is not None and names[-1] == parent:
                names.append(name)
                return
        self._changes.append((parent, array("Q", (name,))))

    def removed(self, name: int) -> None:
        """The block's KV is given up."""
        if self._changes and self._changes[-1][0] is None:
            self._changes[-1][1].append(name)
        else:
            self._changes.append((None, array("Q", (name,))))

    def take(self) -> tuple[KvChange, ...]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return tuple(
            KvRemoved(blocks=names.tobytes()) if parent is None else KvStored(parent=parent, blocks=names.tobytes())
            for parent, names in changes
        )
