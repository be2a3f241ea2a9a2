"""The one table of subjects, buckets and inboxes. Pure: no connection, no I/O.

`SUBJECT_TABLE` is what the documentation renders and what the tests hold against the methods.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from schemas.errors import BusError
from schemas.worker import Record, RuntimeConfig

WorkerVerb = Literal["prefill", "decode", "abort", "resend", "load"]
RouterVerb = Literal["abort", "resend", "explain"]
GatewayVerb = Literal["trace"]
PeerVerb = Literal["metadata", "write", "lease", "confirm", "meet", "landed", "stranded", "kv_snapshot"]
AdminVerb = Literal["drain", "role"]
OpenAiKind = Literal["chat", "completions"]
ServiceName = Literal["gateway", "router", "worker"]

INBOX_ROOT = "_INBOX"
INTERNAL_INBOX_ROOT = "_INBOX.busway"

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
_BAD_SUBJECT = re.compile(r"[\s*>]|^\.|\.\.|\.$|^$")


class SubjectRow(NamedTuple):
    """One line of the table: `{ns}.v1.` comes before each pattern that doesn't start with an underscore."""

    pattern: str
    listener: str
    queue_group: str
    message: str


SUBJECT_TABLE: tuple[SubjectRow, ...] = (
    SubjectRow("openai.{chat,completions}.{model}", "gateway", "gateway", "OpenAI JSON"),
    SubjectRow("requests.{model}", "router", "router", "GenerateRequest -> Ack"),
    SubjectRow(
        "prefill.{model}.{compat}", "prefill workers of a compatibility group", "prefill", "PrefillRequest -> Ack"
    ),
    SubjectRow("decode.{model}.{compat}", "decode workers of a compatibility group", "decode", "DecodeRequest -> Ack"),
    SubjectRow("worker.{worker_id}.{prefill,decode,abort,resend,load}", "that worker", "", "legs, Abort, Resend"),
    SubjectRow("router.{router_id}.{abort,resend,explain}", "that router", "", "Abort, Resend, ExplainRequest"),
    SubjectRow("gateway.{gateway_id}.trace", "that gateway", "", "TraceRequest"),
    SubjectRow(
        "peer.{worker_id}.{metadata,write,lease,confirm,meet,landed,stranded,kv_snapshot}",
        "that worker",
        "",
        "schemas.peer, KvSnapshotRequest",
    ),
    SubjectRow("admin.{worker_id}.{drain,role}", "that worker", "", "Drain, ChangeRole -> Ack"),
    SubjectRow("events.kv.{model}.{worker_id}", "routers", "", "KvEvents"),
    SubjectRow("events.load.{model}.{worker_id}", "routers, gateways", "", "LoadReport"),
    SubjectRow("events.router.{router_id}", "gateways", "", "RouterReport"),
    SubjectRow("hb.{service}.{id}", "everyone who watches the fleet", "", "Heartbeat"),
    SubjectRow("_INBOX.busway.{client_id}.{token}", "that process", "", "answers"),
    SubjectRow("_INBOX.busway.{client_id}.tok.>", "that process", "", "stream frames"),
)


def render_table(rows: tuple[SubjectRow, ...] = SUBJECT_TABLE) -> str:
    """Return the table as Markdown, for ARCHITECTURE.md."""
    head = ["| subject | who listens | queue group | message |", "|---|---|---|---|"]
    body = [f"| `{row.pattern}` | {row.listener} | {row.queue_group or '-'} | {row.message} |" for row in rows]
    return "\n".join([*head, *body])


@lru_cache(maxsize=4096)
def slug(name: str) -> str:
    """Return a name as one subject token and KV key part: [A-Za-z0-9_-] stay, other UTF-8 bytes become `=XX`.

    Two names never share a slug ("a.b" is "a=2Eb"), so models never share a subject.
    """
    return _UNSAFE.sub(lambda match: b"=%02X" % match[0][0], name.encode()).decode() or "="


@lru_cache(maxsize=4096)
def check_subject(subject: str) -> None:
    """Raise BusError for what may not be published to: wildcards, empty tokens, white space.

    nats-server takes `a..b` and `a.*` from publishers without a word.
    """
    if _BAD_SUBJECT.search(subject):
        raise BusError(f"not a subject to publish to: {subject!r}")


def is_inbox(reply: str) -> bool:
    """Return whether answers may go to `reply`: a service that answers anywhere could be made to write anywhere."""
    return reply.startswith(f"{INBOX_ROOT}.") and not _BAD_SUBJECT.search(reply)


def is_under_inbox(stream_subject: str, reply_subject: str) -> bool:
    """Return whether a stream lies under its sender's inbox: the reply subject minus its last token.

    A reply of two tokens (`_INBOX.x`) is itself the inbox. `_INBOX.busway` belongs to all services together and
    is nobody's inbox.
    """
    if not is_inbox(reply_subject) or _BAD_SUBJECT.search(stream_subject):
        return False
    tokens = reply_subject.split(".")
    inbox = ".".join(tokens[:-1]) if len(tokens) > 2 else reply_subject
    return inbox != INTERNAL_INBOX_ROOT and stream_subject.startswith(f"{inbox}.")


@dataclass(frozen=True)
class Subjects:
    """The subjects and buckets of one namespace. Model names and ids are slugged here and nowhere else."""

    namespace: str = "busway"

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.namespace):
            raise BusError(f"a namespace is one subject token of [A-Za-z0-9_-]: {self.namespace!r}")

    @property
    def prefix(self) -> str:
        return f"{self.namespace}.v1"

    def openai(self, kind: OpenAiKind, model: str) -> str:
        return f"{self.prefix}.openai.{kind}.{slug(model)}"

    def requests(self, model: str) -> str:
        return f"{self.prefix}.requests.{slug(model)}"

    def prefill(self, model: str, compat: str) -> str:
        return f"{self.prefix}.prefill.{slug(model)}.{slug(compat)}"

    def decode(self, model: str, compat: str) -> str:
        return f"{self.prefix}.decode.{slug(model)}.{slug(compat)}"

    def worker(self, worker_id: str, verb: WorkerVerb) -> str:
        return f"{self.prefix}.worker.{slug(worker_id)}.{verb}"

    def router(self, router_id: str, verb: RouterVerb) -> str:
        return f"{self.prefix}.router.{slug(router_id)}.{verb}"

    def gateway(self, gateway_id: str, verb: GatewayVerb) -> str:
        return f"{self.prefix}.gateway.{slug(gateway_id)}.{verb}"

    def peer(self, worker_id: str, verb: PeerVerb) -> str:
        return f"{self.prefix}.peer.{slug(worker_id)}.{verb}"

    def admin(self, worker_id: str, verb: AdminVerb) -> str:
        return f"{self.prefix}.admin.{slug(worker_id)}.{verb}"

    def kv_events(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.events.kv.{slug(model)}.{slug(worker_id)}"

    def load(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.events.load.{slug(model)}.{slug(worker_id)}"

    def router_report(self, router_id: str) -> str:
        return f"{self.prefix}.events.router.{slug(router_id)}"

    def heartbeat(self, service: ServiceName, id: str) -> str:
        return f"{self.prefix}.hb.{service}.{slug(id)}"

    @property
    def all_loads(self) -> str:
        return f"{self.prefix}.events.load.>"

    @property
    def all_router_reports(self) -> str:
        return f"{self.prefix}.events.router.>"

    @property
    def all_kv_events(self) -> str:
        return f"{self.prefix}.events.kv.>"

    @property
    def all_heartbeats(self) -> str:
        return f"{self.prefix}.hb.>"

    @property
    def runtime_bucket(self) -> str:
        return f"{self.namespace}_runtime"

    @property
    def cards_bucket(self) -> str:
        return f"{self.namespace}_cards"

    def record_key(self, record: Record) -> str:
        """Return a record's key in the runtime bucket."""
        if isinstance(record, RuntimeConfig):
            return f"{slug(record.model)}.{record.role}.{slug(record.worker_id)}"
        return f"_.{record.service}.{slug(record.id)}"
