"""A model is published as the equal plain JSON, or refused before any of it is lost."""

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from pipeline.domain.errors import PayloadError
from pipeline.domain.payloads import json_payload
from tests.support.payload_models import Aliased, Computed


class Colour(StrEnum):
    """What a plain text field may be given."""

    RED = "red"


class Part(BaseModel):
    """A model that keeps something for itself."""

    name: str
    _seen: list[object] = PrivateAttr(default_factory=lambda: [object()])


class Bigger(Part):
    """A part with more to it."""

    size: int = 0


class Mute:
    """Has no equality of its own."""


class Order(BaseModel):
    """Everything that comes back as it is."""

    model_config = ConfigDict(extra="allow")

    id: UUID
    at: datetime
    total: Decimal
    parts: list[Part]
    by_name: dict[str, Part]
    colour: str = ""
    anything: Any = None
    mute: Annotated[Mute | None, PlainValidator(lambda _: Mute()), PlainSerializer(lambda _: "mute")] = None


ORDER = {
    "id": UUID(int=7),
    "at": datetime(2030, 1, 1, tzinfo=UTC),
    "total": Decimal("12.50"),
    "parts": [Part(name="lid")],
    "by_name": {"lid": Part(name="lid")},
}


class Named(BaseModel):
    """Written by another name than it is read by."""

    order_id: str = Field(serialization_alias="orderId")


class Popping(BaseModel):
    """Takes apart what it is given."""

    total: int

    @model_validator(mode="before")
    @classmethod
    def read(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"total": given.pop("total")}


class Secret(BaseModel):
    """Not written at all, on purpose."""

    token: SecretStr


class Hidden(BaseModel):
    """Left out, on purpose."""

    email: str = Field(default="", exclude=True)


class Cents(BaseModel):
    """Changes what it has changed before."""

    cents: int

    @field_validator("cents", mode="before")
    @classmethod
    def hundredfold(cls, given: int) -> int:
        return given * 100


class Box(BaseModel):
    """Writes of its content what it declares."""

    part: Part
    more: list[Any] = []


class Opaque(BaseModel):
    """Holds a value that JSON lacks."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    it: Mute


def test_a_payload_that_is_no_model_stays_unchanged() -> None:
    given = {"any": [1, "thing"]}
    assert json_payload(given, what="it") is given


@pytest.mark.parametrize(
    ("model", "written"),
    [
        (Aliased(orderId="1"), {"orderId": "1"}),
        (Named(order_id="1"), {"order_id": "1"}),
        (Computed(a=1), {"a": 1}),
        (Popping(total=3), {"total": 3}),
        (Hidden(), {}),
        (Box(part=Part(name="lid"), more=[(1, 2)]), {"part": {"name": "lid"}, "more": [[1, 2]]}),
    ],
)
def test_a_model_is_written_as_it_is_read(model: BaseModel, written: Any) -> None:
    assert json_payload(model, what="it") == written


def test_types_of_all_kinds_come_back() -> None:
    order = Order(**ORDER, colour=Colour.RED, mute="x", more=["of", {"it": 1}])
    written = json_payload(order, what="it")
    assert (written["total"], written["parts"], written["more"]) == ("12.50", [{"name": "lid"}], ["of", {"it": 1}])


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: Secret(token=SecretStr("s3cret")), "$.token of a Secret"),
        (lambda: Hidden(email="s3cret"), "$.email of a Hidden"),
        (lambda: Cents(cents=12), "$.cents of a Cents"),
        (lambda: Box(part=Bigger(name="lid", size=3)), "$.part of a Box"),
        (lambda: Box(part=Part(name="lid"), more=[0, SecretStr("s3cret")]), "$.more[1] of a Box"),
        (lambda: Order(**ORDER, anything=datetime(2030, 1, 1, tzinfo=UTC)), "$.anything of a Order"),
        (lambda: Part.model_construct(**{}), "$.name of a Part"),
        (lambda: Opaque(it=Mute()), "a Opaque cannot be written as JSON"),
    ],
)
def test_a_model_that_would_not_come_back_is_refused_without_its_values(
    made: Callable[[], BaseModel], named: str
) -> None:
    with pytest.raises(PayloadError) as refusal:
        json_payload(made(), what="payload of 'm1'")
    said = str(refusal.value)
    assert said.startswith(f"payload of 'm1': {named}")
    assert "s3cret" not in said
    assert said.endswith("Nothing was written.")
