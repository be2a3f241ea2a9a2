"""The runtime bucket as a store of leases: records with a time to live, written with the expected revision.

nats-py's KeyValue can't renew a TTL (`put` even removes it), so records are published to the bucket's subjects.
"""

from typing import NamedTuple

from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import StorageType
from nats.js.errors import APIError, NotFoundError

from schemas.errors import BusUnavailableError, RequestError
from schemas.message import decode
from schemas.worker import Record

RECORD_TTL_S = 15
MARKER_TTL_S = 5.0
_WRONG_REVISION_CODES = (10071, 10164)
_STREAM_EXISTS_CODE = 10058


class WrongRevisionError(Exception):
    """The key has been written by someone else, or expired, since the revision that was expected."""


class Stored(NamedTuple):
    """The last entry of a key: revision 0 and no record when there is none; a marker has a revision only."""

    revision: int
    record: Record | None


class LeaseStore:
    """One bucket. All methods raise BusUnavailableError when JetStream doesn't answer."""

    def __init__(self, jetstream: JetStreamContext, bucket: str, *, replicas: int = 1) -> None:
        self._js = jetstream
        self._replicas = replicas
        self.bucket = bucket
        self.stream = f"KV_{bucket}"
        self.prefix = f"$KV.{bucket}."

    async def ensure(self) -> None:
        """Create the bucket if it isn't there: in memory (records outlive their process by seconds at most, so a
        restarted server should begin without them), with markers that make expiry visible to watchers."""
        try:
            await self._js.create_key_value(
                bucket=self.bucket,
                history=1,
                storage=StorageType.MEMORY,
                limit_marker_ttl=MARKER_TTL_S,
                replicas=self._replicas,
            )
        except APIError as error:
            if error.err_code != _STREAM_EXISTS_CODE:  # an operator's own bucket (replicas, …) is as good
                why = "nobody answers, is JetStream enabled?" if error.code is None else str(error)
                raise BusUnavailableError(f"can't create bucket {self.bucket}: {why}") from error
        except Error as error:
            raise BusUnavailableError(f"JetStream doesn't answer: {error}") from error

    async def read(self, key: str) -> Stored:
        """Return the last entry of a key."""
        try:
            msg = await self._js.get_last_msg(self.stream, f"{self.prefix}{key}")
        except NotFoundError:
            return Stored(0, None)
        except Error as error:
            raise BusUnavailableError(f"JetStream doesn't answer: {error}") from error
        return Stored(msg.seq or 0, parse_record(msg.data or b""))

    async def write(self, key: str, payload: bytes, expected_revision: int, *, ttl_s: int = RECORD_TTL_S) -> int:
        """Write an entry that lives `ttl_s` (whole seconds, at least 1); return its revision.

        Raises WrongRevisionError.
        """
        headers = {"Nats-Expected-Last-Subject-Sequence": str(expected_revision)}
        try:
            ack = await self._js.publish(f"{self.prefix}{key}", payload, headers=headers, msg_ttl=ttl_s)
        except APIError as error:
            if error.err_code in _WRONG_REVISION_CODES:
                raise WrongRevisionError(str(error)) from error
            raise BusUnavailableError(f"record not written: {error}") from error
        except Error as error:
            raise BusUnavailableError(f"JetStream doesn't answer: {error}") from error
        return int(ack.seq)

    async def delete(self, key: str, expected_revision: int) -> None:
        """Delete an entry unless somebody else wrote it since; watchers see it at once."""
        headers = {"KV-Operation": "DEL", "Nats-Expected-Last-Subject-Sequence": str(expected_revision)}
        try:
            await self._js.publish(f"{self.prefix}{key}", b"", headers=headers)
        except APIError as error:
            if error.err_code not in _WRONG_REVISION_CODES:
                raise BusUnavailableError(f"record not deleted: {error}") from error
        except Error as error:
            raise BusUnavailableError(f"JetStream doesn't answer: {error}") from error


def parse_record(payload: bytes) -> Record | None:
    """Return the record in an entry, or None for markers and what isn't one (a newer release's, an intruder's)."""
    if not payload:
        return None
    try:
        record: Record = decode(payload, Record)  # type: ignore[arg-type]
    except RequestError:
        return None
    return record
