"""The item the engine works on. Read-only as deep as it goes.

It is the same after a trip through JSON if its payload and metadata are made of what JSON has. The
engine does not ask for that: a payload is opaque to it, and may be any object of a source in this process.
"""

from collections.abc import Mapping
from datetime import UTC
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, PlainSerializer, StringConstraints

from pipeline.engine.frozen import frozen, thawed

Id = Annotated[str, StringConstraints(strip_whitespace=False, min_length=1, max_length=1024, pattern=r"\S")]


class Transaction(BaseModel):
    """One item, known by an id that is unique in the world and stays the same when it is delivered again.

    A transform makes a new transaction with an id of its own and names the old one in ``parent_id``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    transaction_id: Id
    payload: Annotated[Any, AfterValidator(frozen), PlainSerializer(thawed)] = None  #: opaque to the engine
    created_at: Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]
    source: str | None = None  #: where it comes from
    correlation_id: str | None = None  #: what it belongs to
    parent_id: str | None = None  #: the transaction it was made from
    traceparent: str | None = None  #: the trace that made it, as W3C writes it
    metadata: Annotated[Mapping[str, Any], AfterValidator(frozen), PlainSerializer(thawed)] = frozen({})

    def __repr__(self) -> str:
        """Its id only: what is in a payload does not belong into logs."""
        return f"Transaction({self.transaction_id!r})"

    __str__ = __repr__
