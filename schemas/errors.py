"""Every error that a user or a peer can see, in one tree, and the record in which it crosses the bus.

BuswayError
├── RequestError           400  never retried
│   ├── ContextOverflowError   400  prompt and answer don't fit the model's context
│   ├── ModelNotFoundError     404
│   └── RequestTooLargeError   413
├── CapacityError          429  try later (retry_after_s)
│   ├── AdmissionError         429  the first token is estimated to come later than its deadline or the set limit
│   └── UnavailableError       503  no complete path for the model, or a service is leaving
├── DeadlineError          504  names the phase that ran out of time
├── WorkerError            500  retryable on another worker
│   ├── EngineError            the engine failed on this request
│   └── WorkerLostError        the holder of the request is gone
├── KvTransferError        500
│   ├── KvMismatchError        the two sides' KV can't be converted
│   ├── KvTransferFailedError  the bytes did not arrive
│   └── LeaseExpiredError      the KV is no longer the request's
├── BusError               503
│   ├── BusUnavailableError    no connection to NATS
│   ├── NoRespondersError      nobody listens on the subject
│   ├── AckTimeoutError        nobody answered within the hop's second
│   ├── StreamBrokenError      frames are missing or stopped
│   └── PayloadTooLargeError   413 with both numbers
└── AbortedError           499  the request's own side gave it up
"""

from typing import ClassVar, Literal

import msgspec

Phase = Literal["gateway", "queue", "prefill", "transfer", "decode", "stream", "total"]


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="error.v1", tag_field="type"):
    """A BuswayError on the bus; `code` is the key of the class, the rest its attributes."""

    code: str
    message: str
    phase: Phase | None = None
    param: str | None = None
    retry_after_s: float | None = None


class BuswayError(Exception):
    """The root. `code`, `http_status` and `retryable` belong to the class, the rest to the occurrence.

    `param` names the offending field of the user's request; `retry_after_s` is a hint in seconds.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        phase: Phase | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.phase = phase
        self.param = param
        self.retry_after_s = retry_after_s

    def record(self) -> ErrorRecord:
        """Return the form in which this error crosses the bus."""
        return ErrorRecord(
            code=self.code,
            message=self.message,
            phase=self.phase,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class RequestError(BuswayError):
    code = "invalid_request"
    http_status = 400


class ContextOverflowError(RequestError):
    """`code` is OpenAI's, which clients look for when they shorten a conversation."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    code = "model_not_found"
    http_status = 404


class RequestTooLargeError(RequestError):
    code = "request_too_large"
    http_status = 413


class CapacityError(BuswayError):
    code = "overloaded"
    http_status = 429
    retryable = True


class AdmissionError(CapacityError):
    """Estimate and limit are in the message; `retry_after_s` is how far the one is over the other."""

    code = "estimated_too_late"


class UnavailableError(CapacityError):
    code = "unavailable"
    http_status = 503


class DeadlineError(BuswayError):
    code = "deadline_exceeded"
    http_status = 504


class WorkerError(BuswayError):
    code = "worker_error"
    retryable = True


class EngineError(WorkerError):
    code = "engine_failed"


class WorkerLostError(WorkerError):
    code = "worker_lost"


class KvTransferError(BuswayError):
    code = "kv_transfer"
    retryable = True


class KvMismatchError(KvTransferError):
    code = "kv_mismatch"
    retryable = False


class KvTransferFailedError(KvTransferError):
    code = "kv_transfer_failed"


class LeaseExpiredError(KvTransferError):
    code = "kv_lease_expired"


class BusError(BuswayError):
    code = "bus_error"
    http_status = 503
    retryable = True


class BusUnavailableError(BusError):
    code = "bus_unavailable"


class NoRespondersError(BusError):
    code = "no_responders"


class AckTimeoutError(BusError):
    code = "ack_timeout"


class StreamBrokenError(BusError):
    code = "stream_broken"


class PayloadTooLargeError(BusError):
    code = "payload_too_large"
    http_status = 413
    retryable = False


class AbortedError(BuswayError):
    code = "aborted"
    http_status = 499


def _tree(cls: type[BuswayError]) -> dict[str, type[BuswayError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS_BY_CODE: dict[str, type[BuswayError]] = _tree(BuswayError)


def error_from(record: ErrorRecord) -> BuswayError:
    """Return the exception for a record; a code from a newer release becomes the root class."""
    cls = ERRORS_BY_CODE.get(record.code, BuswayError)
    return cls(record.message, phase=record.phase, param=record.param, retry_after_s=record.retry_after_s)
