"""Formats of a schema are checked where events come in, as the model would read them."""

import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import (
    UUID4,
    AnyUrl,
    BaseModel,
    BeforeValidator,
    Field,
    HttpUrl,
    IPvAnyAddress,
    IPvAnyNetwork,
    RootModel,
    SecretStr,
    create_model,
)

from pipeline.domain.errors import PayloadError
from pipeline.transitions import payload_schemas

A_UUID = "01a1e571-dadf-4e70-ae43-8088c9242434"


def check(schema: Any, payload: Any, what: str = "it") -> None:
    payload_schemas.check_payload(payload_schemas.validator_of(schema), payload, what=what, topic="orders")


def checked(kind: Any, value: Any) -> Any:
    """The payload, after the check that publishers meet and the one that consumers make."""
    model = create_model("Order", it=(kind, ...))
    check(payload_schemas.json_schema(model), {"it": value}, "payload of 'm1'")
    return getattr(model.model_validate({"it": value}), "it")  # noqa: B009 - a model made here has it


@pytest.mark.parametrize(
    ("kind", "bad", "good"),
    [
        (datetime, ["yesterday", "2026-02-30T00:00:00Z"], ["2026-01-01T10:00:00Z", "2026-01-01 10:00", "2026-01-01"]),
        (date, ["31.12.2026", "2026-13-01"], ["2026-12-31"]),
        (time, ["25:00", "noon"], ["10:00", "10:00:01.5"]),
        (timedelta, ["soon"], ["PT1H", "00:01:30"]),
        (UUID, ["4711"], [A_UUID, A_UUID.replace("-", "")]),
        (UUID4, ["01a1e571-dadf-7e70-ae43-8088c9242434"], [A_UUID]),
        (Decimal, ["12,50", "much", ""], ["12.50", "-1e3", 12, 12.5]),
        (Annotated[Decimal, Field(allow_inf_nan=True)], ["much"], ["Infinity"]),
        (Annotated[Decimal, Field(gt=0, max_digits=5)], ["12,50"], ["12.50"]),
        (HttpUrl, ["nope", "http://"], ["https://example.org/a?b=c"]),
        (AnyUrl, ["nope"], ["mailto:ada@example.org"]),
        (IPv4Address, ["1.2.3", "::1"], ["1.2.3.4"]),
        (IPv6Address, ["1.2.3.4"], ["::1"]),
        (IPvAnyAddress, ["home"], ["::1", "1.2.3.4"]),
        (IPv4Network, ["1.2.3.4/99"], ["1.2.3.0/24"]),
        (IPvAnyNetwork, ["home"], ["1.2.3.0/24"]),
        (IPv4Interface, ["home"], ["1.2.3.4/24"]),
        (re.Pattern[str], ["("], ["a+"]),
        (datetime | None, ["yesterday"], [None, "2026-01-01T10:00:00Z"]),
        (list[date], [["2026-12-31", "later"]], [["2026-12-31"]]),
        (dict[str, Decimal], [{"a": "1", "b": "x"}], [{"a": "1"}]),
        (Decimal | str, [[]], ["much", "12.50"]),
        (SecretStr, [], ["anything"]),
    ],
    ids=str,
)
def test_a_text_that_the_model_could_not_read_is_refused_and_no_other(
    kind: Any, bad: list[Any], good: list[Any]
) -> None:
    for value in good:
        checked(kind, value)
    for value in bad:
        with pytest.raises(PayloadError, match=r"^payload of 'm1': \$\.it.* does not fit; expected "):
            checked(kind, value)


def test_a_refusal_names_the_path_and_the_format_and_not_the_text() -> None:
    with pytest.raises(PayloadError) as refusal:
        checked(list[datetime], ["2026-01-01T10:00:00Z", "s3cret"])
    assert str(refusal.value) == (
        "payload of 'm1': $.it[1] does not fit; expected format \"date-time\", as topic 'orders' declares. "
        "Nothing was written."
    )


def test_a_missing_field_is_named_and_not_those_that_are_there() -> None:
    class Customer(BaseModel):
        name: str
        email: str

    class Order(BaseModel):
        order: str
        customer: Customer

    with pytest.raises(PayloadError) as refusal:
        checked(Order, {"order": "1", "customer": {"name": "Ada"}})
    assert str(refusal.value) == (
        "payload of 'm1': $.it.customer.email is missing; expected it, as topic 'orders' declares. Nothing was written."
    )


def test_a_mail_address_has_a_sign_that_makes_it_one() -> None:
    schema = {"type": "string", "format": "email"}
    check(schema, "ada@example.org")
    with pytest.raises(PayloadError, match='format "email"'):
        check(schema, "ada")


def test_a_format_of_a_value_that_is_no_text_and_an_unknown_format_refuse_nothing() -> None:
    check({"format": "date"}, 7)
    check({"type": "string", "format": "colour"}, "so-so")


def test_a_model_that_reads_other_text_declares_it_in_its_schema() -> None:
    def german(given: str) -> str:
        return "-".join(reversed(given.split(".")))

    day = Annotated[date, BeforeValidator(german, json_schema_input_type=str)]
    assert checked(day, "31.12.2026") == date(2026, 12, 31)


def test_the_validator_of_a_schema_is_made_once() -> None:
    schema = payload_schemas.json_schema(RootModel[date])
    check(schema, "2026-12-31")
    made = payload_schemas._validator.cache_info().misses
    for _ in range(10):
        check(dict(schema), "2026-12-31")
    assert payload_schemas._validator.cache_info().misses == made


def test_the_schema_of_a_result_follows_from_the_type_that_its_operation_returns() -> None:
    assert payload_schemas.result_schema(Any) is None, "nothing is declared"
    assert payload_schemas.result_schema(None) == {"type": "null"}
    assert payload_schemas.result_schema(dict[str, str])["type"] == "object"  # type: ignore[index]
    assert payload_schemas.result_schema(Annotated[int, []]) == {"type": "integer"}, "a type that cannot be a key"
    unreadable = payload_schemas.result_schema(type("Unreadable", (), {}))
    payload_schemas.check_result(unreadable, {"id": 1}, what="result", operation="mail.send")
    with pytest.raises(PayloadError, match=r"\$ does not fit; .*as mail\.send declares"):
        payload_schemas.check_result(unreadable, None, what="result", operation="mail.send")
