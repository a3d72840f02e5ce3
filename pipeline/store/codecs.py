"""The codecs of a process: which workflow has which, and where sealed values of rows are opened.

``Transaction`` passes each row through ``Codecs.open_rows``, so that whatever reads a row gets the value. One that
cannot be opened stays ``Unreadable``: it can be listed and shown, and ``domain.codec.opened`` raises where code would
use it. A process without codecs leaves rows as they are.

Each encrypted workflow has a secret of its own, sealed in its row. It keeps the hashes of requests from telling what
was requested, it survives a change of keys, and it shows whether a process has the right ones.
"""

import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from pipeline.config import Settings
from pipeline.domain.codec import MARKER, Codec, Unreadable, is_sealed, key_id_of, missing_key, opened, seal, unseal
from pipeline.domain.errors import InvalidInputError, MissingKeyError, TamperedError
from pipeline.domain.values import NewEvent
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import OPEN_DELIVERY, OPEN_MUTATION
from pipeline.store.rows import OfferedEvent

KEYS_VARIABLE, FILE_VARIABLE = "PIPELINE_CODEC_KEYS", "PIPELINE_CODEC_KEYS_FILE"
_KEYS = "keys as `id:base64` of 32 bytes, the newest first, separated by commas or lines"
_KEY_LENGTH, _NONCE_LENGTH = 32, 12
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PRIVATE_EVIDENCE = (
    "external_id",
    "found",
    "replacement_result",
    "result",
    "row",
)  #: what quotes a request or a result


class AesGcm:
    """The codec that ships: AES-256-GCM with keys by id. The first key encrypts, and all of them decrypt.

    A key may encrypt 2**32 values: replace it before.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise InvalidInputError(
                "AesGcm needs cryptography; install it with `pip install 'celery-durable-effects[codec]'`."
            ) from None
        for key_id, key in keys.items():
            if not _KEY_ID.fullmatch(key_id) or len(key) != _KEY_LENGTH:
                raise InvalidInputError(
                    f"The key {key_id!r} has {len(key)} bytes; expected {_KEY_LENGTH} bytes, under an id of letters, "
                    "digits, dots, dashes and underscores."
                )
        if not keys:
            raise InvalidInputError(f"A codec was given no key; expected {_KEYS}.")
        self._ciphers, self._invalid = {key_id: AESGCM(key) for key_id, key in keys.items()}, InvalidTag
        self.key_id = next(iter(keys))

    @classmethod
    def from_text(cls, text: str) -> "AesGcm":
        """Read keys as `id:base64`, the newest first, separated by commas or lines. A line may be a # comment."""
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        keys: dict[str, bytes] = {}
        for number, part in enumerate(filter(None, (each.strip() for line in lines for each in line.split(","))), 1):
            key_id, colon, written = part.partition(":")
            try:
                key = base64.b64decode(written, validate=True)
            except ValueError:
                key = b""
            if not colon or key_id in keys or len(key) != _KEY_LENGTH:  # the message quotes no part of a key
                raise InvalidInputError(
                    f"Key number {number} of a codec cannot be used; expected {_KEYS}, each id once."
                )
            keys[key_id] = key
        return cls(keys)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "AesGcm":
        """Read the keys of PIPELINE_CODEC_KEYS, or of the file that PIPELINE_CODEC_KEYS_FILE names."""
        found = _codec_with(environ.get(KEYS_VARIABLE, ""), environ.get(FILE_VARIABLE, ""))
        if found is None:
            raise InvalidInputError(f"A codec has no keys; expected {KEYS_VARIABLE} or {FILE_VARIABLE} with {_KEYS}.")
        return found

    def encode(self, plain: bytes, context: bytes) -> bytes:
        """Encrypt with the newest key and a random nonce."""
        nonce = secrets.token_bytes(_NONCE_LENGTH)
        return nonce + self._ciphers[self.key_id].encrypt(nonce, plain, context)

    def decode(self, data: bytes, context: bytes, key_id: str) -> bytes:
        """Decrypt with the key of this id."""
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise missing_key(key_id)
        try:
            return cipher.decrypt(data[:_NONCE_LENGTH], data[_NONCE_LENGTH:], context)
        except (self._invalid, ValueError):
            raise TamperedError("the ciphertext or its place was changed") from None


def default_codecs(settings: Settings) -> "Codecs | None":
    """Return the codecs of a process without code of workflows; None if the settings have no keys."""
    codec = settings_codec(settings)
    return None if codec is None else Codecs(default=codec)


def settings_codec(settings: Settings) -> AesGcm | None:
    """Return the codec with the keys of the settings; None if they have none."""
    return _codec_with(settings.codec_keys.get_secret_value(), settings.codec_keys_file)


def _codec_with(keys: str, file: "str | Path | None") -> AesGcm | None:
    if file:
        try:
            keys = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise InvalidInputError(f"{FILE_VARIABLE}: {file} cannot be read: {reason}; expected {_KEYS}.") from None
    return AesGcm.from_text(keys) if keys.strip() else None


class _TopicUidRow(Protocol):
    name: str
    uid: UUID


class _KeyRow(Protocol):
    key_id: str


class _SecretRow(Protocol):
    codec_secret: Any


_TOPIC_UIDS = Statement[_TopicUidRow]("SELECT name, uid FROM pipeline.topics WHERE workflow = :workflow")
_SECRET = Statement[_SecretRow]("SELECT codec_secret FROM pipeline.workflows WHERE name = :workflow")
_OLDEST_SECRET = Statement[_SecretRow]("""
SELECT codec_secret FROM pipeline.workflows WHERE codec_secret IS NOT NULL ORDER BY created_at, name LIMIT 1
""")


#: Of the oldest open deliveries, runs that are not over, their requests, and states.
_WAITING_KEYS = Statement[_KeyRow](f"""
SELECT DISTINCT x.sealed -> '{MARKER}' ->> 'key' AS key_id FROM (
  SELECT e.payload FROM (
    SELECT d.event_id FROM pipeline.handlers h JOIN pipeline.deliveries d ON d.handler_id = h.id
    WHERE h.workflow = :workflow AND d.status IN {OPEN_DELIVERY} LIMIT 10000) d
  JOIN pipeline.events e ON e.id = d.event_id
  UNION ALL SELECT h.state FROM pipeline.handlers h WHERE h.workflow = :workflow
  UNION ALL SELECT r.prepare_result -> 'data' FROM pipeline.runs r
    WHERE r.workflow = :workflow AND (r.finished_at IS NULL OR r.retry_pending)
  UNION ALL SELECT m.params FROM pipeline.mutations m WHERE m.workflow = :workflow AND m.status IN {OPEN_MUTATION}
) x(sealed) WHERE x.sealed ? '{MARKER}' ORDER BY 1
""")


class Codecs:
    """The codecs that a process knows.

    ``declared`` has a codec or None for each workflow whose code is here. ``default`` is for all others.
    """

    def __init__(self, declared: Mapping[str, Codec | None] | None = None, default: Codec | None = None) -> None:
        self.declared, self.default = dict(declared or {}), default
        self._uids: dict[str, dict[str, UUID]] = {}
        self._secrets: dict[str, bytes] = {}

    @property
    def any_codec(self) -> Codec | None:
        """Return a codec of this process, for what belongs to no workflow."""
        return self.default or next(filter(None, self.declared.values()), None)

    def is_private(self, workflow: str) -> bool:
        """Return whether the code here declares a codec for a workflow."""
        return self.declared.get(workflow) is not None

    def writer(self, tx: Transaction, workflow: str) -> Codec | None:
        """Return the codec that seals values of a workflow; None if it has none. Nothing is read for code that is here.

        Raises ``MissingKeyError`` or ``TamperedError`` if this process does not have the keys of the workflow.
        """
        if workflow in self.declared:
            return self.declared[workflow]
        if workflow in self._secrets:
            return self.default
        row = tx.first(_SECRET, workflow=workflow)
        if row is None or row.codec_secret is None:
            return None
        self._secrets[workflow] = self.open_secret(row.codec_secret)
        return self.default

    def secret(self, tx: Transaction, workflow: str) -> bytes:
        """Return the secret of an encrypted workflow, which is read once."""
        if workflow not in self._secrets:
            row = tx.first(_SECRET, workflow=workflow)
            if row is None or row.codec_secret is None:
                raise MissingKeyError(
                    f"The code of workflow {workflow!r} has a codec, and the database does not know that; expected a "
                    "worker that registers this code. Start one."
                )
            self._secrets[workflow] = self.open_secret(row.codec_secret)
        return self._secrets[workflow]

    def open_secret(self, sealed: Any) -> bytes:
        """Open the secret of a workflow with any codec of this process."""
        return base64.b64decode(opened(self._opened(sealed, "secret")))

    def request_hash(self, tx: Transaction, hashed: str) -> str:
        """Return the hash of a request to the HTTP API, keyed: its body may be a payload."""
        row = tx.first(_OLDEST_SECRET)
        secret = None if row is None else self._opened(row.codec_secret, "secret")
        return keyed_hash(secret.encode(), hashed) if isinstance(secret, str) else hashed

    def topic_uid(self, tx: Transaction, workflow: str, topic: str) -> UUID | None:
        """Return the uid of a topic, which a rename keeps. It is read once for each name."""
        known = self._uids.get(workflow, {})
        if topic not in known:
            known = {row.name: row.uid for row in tx.all(_TOPIC_UIDS, workflow=workflow)}
            self._uids[workflow] = known
        return known.get(topic)

    def seal_payload(self, tx: Transaction, workflow: str, event: NewEvent) -> NewEvent:
        """Return an event of a workflow of this process with its payload sealed."""
        codec = self.writer(tx, workflow)
        if codec is None:
            return event
        uid = self.topic_uid(tx, workflow, event.topic)
        return replace(event, payload=seal(codec, event.payload, "payload", uid, event.message_id))

    def open_published(self, workflow: str, event: NewEvent) -> Any:
        """Return the payload of an event that was sealed for the way over the broker. Raise if it cannot be read."""
        place = published_place(workflow, event)
        return opened(self._opened(event.payload, *place, workflow=workflow))

    def open_rows(self, tx: Transaction, rows: Sequence[Any]) -> Sequence[Any]:
        """Open the sealed values of rows."""
        columns = _sealed_columns(getattr(rows[0], "_fields", ()))
        return [self._open_row(tx, row, columns) for row in rows] if columns else rows

    def _open_row(self, tx: Transaction, row: Any, columns: Sequence[str]) -> Any:
        changed = {}
        for name in columns:
            value = getattr(row, name)
            if value and isinstance(value, dict | list):
                found = _COLUMNS[name](self, tx, row, value)
                if found is not value:
                    changed[name] = found
        return row._replace(**changed) if changed else row

    def _opened(self, value: Any, *place: object, workflow: str = "") -> Any:
        """Return what was sealed for a place. What cannot be opened stays sealed, and says why."""
        if not is_sealed(value):
            return value
        error: MissingKeyError | TamperedError | None = None
        own = self.declared.get(workflow)
        codecs = [own] if own is not None else [*self.declared.values(), self.default]
        for codec in codecs:
            try:
                if codec is not None:
                    return unseal(codec, value, *place)
            except (MissingKeyError, TamperedError) as failed:
                error = failed if error is None or isinstance(failed, TamperedError) else error
        return Unreadable(value, error or missing_key(key_id_of(value)))

    def open_payload(self, tx: Transaction, workflow: str, row: Any, payload: Any) -> Any:
        """Return the payload of an event. A topic that took another's name since it was last read is read again."""
        found = payload
        for _ in range(2) if is_sealed(payload) else ():
            uid = self.topic_uid(tx, workflow, row.topic)
            found = self._opened(payload, "payload", uid, row.message_id, workflow=workflow)
            if not (isinstance(found, Unreadable) and isinstance(found.error, TamperedError)):
                break
            self._uids.pop(workflow, None)
        return found


def published_place(workflow: str, event: NewEvent) -> tuple[object, ...]:
    """Return the place of a payload on its way to a worker. The names are those that the publisher gave."""
    return ("published", workflow, event.topic, event.message_id)


def missing_keys(tx: Transaction, workflow: str, codec: Codec) -> list[str]:
    """Return the ids of keys that a codec lacks and that data of the workflow which waits was sealed with."""
    return [row.key_id for row in tx.all(_WAITING_KEYS, workflow=workflow) if not _has_key(codec, row.key_id)]


def _has_key(codec: Codec, key_id: str) -> bool:
    try:
        codec.decode(b"", b"", key_id)
    except MissingKeyError:
        return False
    except TamperedError:
        return True
    return True


def keyed_hash(secret: bytes, text: str) -> str:
    """Return a hash that cannot be guessed without the secret, however few texts there could be."""
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def codec_for(tx: Transaction, workflow: str) -> Codec | None:
    """Return the codec that seals what is written for a workflow; None if it is not encrypted.

    Raises ``MissingKeyError`` if it is, and this process has no codec.
    """
    if tx.codecs is not None:
        return tx.codecs.writer(tx, workflow)
    row = tx.first(_SECRET, workflow=workflow)
    if row is None or row.codec_secret is None:
        return None
    raise refusal(workflow)


def refusal(workflow: str) -> MissingKeyError:
    """Return the error of a process that would have to write for an encrypted workflow, and cannot."""
    return MissingKeyError(
        f"Workflow {workflow!r} is encrypted, and this process has no codec; expected its keys in {KEYS_VARIABLE} or "
        f"{FILE_VARIABLE}, or codec=... at the client. Nothing was written."
    )


def sealed_evidence(tx: Transaction, workflow: str | None, mutation_id: object, evidence: Any) -> Any:
    """Return the evidence of an act with what may quote a request or a result sealed."""
    private = [name for name in _PRIVATE_EVIDENCE if evidence.get(name) is not None] if evidence else []
    codec = codec_for(tx, workflow) if private and workflow is not None else None
    if codec is None:
        return evidence
    return {**evidence, **{name: seal(codec, evidence[name], "evidence", mutation_id, name) for name in private}}


def _plan(codecs: Codecs, _: Transaction, row: Any, plan: Any) -> Any:
    parts = {
        name: codecs._opened(plan[name], *plan_place(name, row.handler_id, row.event_ids), workflow=row.workflow)
        for name in ("data", "ui")
        if is_sealed(plan.get(name))
    }
    return {**plan, **parts} if parts else plan


def plan_place(part: str, handler_id: int, event_ids: Iterable[int]) -> tuple[object, ...]:
    """Return the place of a part of a plan. A retry has the same handler and the same inputs."""
    return (f"plan {part}", handler_id, *sorted(event_ids))


def _offered(codecs: Codecs, tx: Transaction, row: Any, offered: Any) -> Any:
    names = OfferedEvent._fields
    at = names.index("payload")
    return [
        [*each[:at], codecs.open_payload(tx, row.workflow, OfferedEvent._make(each), each[at]), *each[at + 1 :]]
        if is_sealed(each[at])
        else each
        for each in offered
    ]


def _result(codecs: Codecs, _: Transaction, row: Any, value: Any) -> Any:
    return codecs._opened(value, "result", getattr(row, "mutation_id", None) or row.id)


def _evidence(codecs: Codecs, _: Transaction, row: Any, evidence: Any) -> Any:
    if not isinstance(evidence, dict):
        return evidence
    return {name: codecs._opened(value, "evidence", row.mutation_id, name) for name, value in evidence.items()}


def _answer(codecs: Codecs, _: Transaction, row: Any, answer: Any) -> Any:
    if hasattr(row, "caller"):
        return codecs._opened(answer, "answer", row.caller, row.key)
    return {name: codecs._opened(value, "proposal", row.mutation_id, name) for name, value in answer.items()}


def _items(codecs: Codecs, _: Transaction, __: Any, items: Any) -> Any:
    return [
        {name: codecs._opened(value, "preview", item["subject"], name) for name, value in item.items()}
        for item in items
    ]


#: How each column that may have sealed values is opened. Its row has what names the place.
_COLUMNS: Mapping[str, Callable[[Codecs, Transaction, Any, Any], Any]] = {
    "payload": lambda codecs, tx, row, value: codecs.open_payload(tx, row.workflow, row, value),
    "offered_events": _offered,
    "prepare_result": _plan,
    "params": lambda codecs, _, row, value: codecs._opened(value, "params", row.run_id),
    "result": _result,
    "late_result": _result,
    "mutation_result": _result,
    "handler_state": lambda codecs, _, row, value: codecs._opened(value, "state", row.handler_id),
    "output_state": lambda codecs, _, row, value: codecs._opened(value, "state", row.handler_id),
    "state": lambda codecs, _, row, value: codecs._opened(value, "state", row.id),
    "evidence": _evidence,
    "answer": _answer,
    "items": _items,
}


@lru_cache(maxsize=1000)
def _sealed_columns(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in fields if name in _COLUMNS)
