"""How operations are declared: typed parameters, grades, what people see, and credentials that go nowhere."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, Secret, SecretBytes, SecretStr, computed_field, field_validator

from pipeline import Applied, Call, Connector, LogicError, Verdict, mutation, read
from pipeline.connectors import Grade
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading


class Address(BaseModel):
    """A parameter with parts."""

    city: str


class Payments(Connector):
    """An outside system of these tests."""

    name = "payments"

    def __init__(self) -> None:
        self.token = SecretStr("sk_live_4711")

    @read
    def find(self, *, order: str) -> dict[str, Any]:
        """Reconcile."""
        return {"order": order}

    @mutation(keyed=True, redact=["card"], shows="Charge {cents} cents for {order} to {card}")
    def charge(
        self,
        call: Call,
        *,
        order: str,
        cents: int,
        card: str = "",
        at: datetime | None = None,
        fee: Decimal = Decimal(0),
        to: Address | None = None,
    ) -> Any:
        """A charge."""
        del self, call
        return order, cents, card, at, fee, to

    @charge.reconcile
    def find_charge(self, call: Call, **_: Any) -> Verdict:
        """Whether it is there."""
        return Applied(call.idempotency_key)

    @mutation()
    def note(self, call: Call, **anything: Any) -> None:
        """Takes whatever it is given."""

    @mutation(
        errors=lambda error: ErrorReading(meaning=ErrorMeaning.REFUSED) if "card" in str(error) else None, keyed=True
    )
    def refund(self, call: Call, *, order: str) -> None:
        """Reads its own errors."""


CHARGE = Payments.operations()["charge"]
AT = datetime(2030, 1, 1, tzinfo=UTC)


def test_parameters_are_stored_as_json_and_read_back_with_their_types() -> None:
    written = CHARGE.to_stored_params(
        {"order": "o1", "cents": 5, "at": AT, "fee": Decimal("0.10"), "to": Address(city="Rome")}
    )
    assert written == {
        "order": "o1",
        "cents": 5,
        "card": "",
        "at": "2030-01-01T00:00:00Z",
        "fee": "0.10",
        "to": {"city": "Rome"},
    }
    given = CHARGE.arguments(written)
    assert (given["at"], given["fee"], given["to"]) == (AT, Decimal("0.10"), Address(city="Rome"))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"order": "o1"}, "charge was not given cents, which has no default"),
        ({"order": "o1", "cents": "many"}, "a wrong cents: Input should be a valid integer"),
        ({"order": "o1", "cents": 1, "color": "red"}, "a wrong color: Extra inputs are not permitted"),
        ({"order": "o1", "cent": 1}, "a wrong cent: Extra inputs are not permitted; it takes: order, cents, card, at"),
        ({"order": "o1", "cents": 1, "to": {"city": 7}}, "a wrong to.city"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_name(params: dict[str, Any], expected: str) -> None:
    with pytest.raises(LogicError, match=expected):
        CHARGE.to_stored_params(params)


def test_a_refusal_does_not_repeat_the_parameters() -> None:
    with pytest.raises(LogicError) as caught:
        CHARGE.to_stored_params({"order": "o1", "cents": "4111 1111 1111 1111"})
    assert "4111" not in str(caught.value)


def test_an_operation_with_any_parameters_gets_them_unchanged() -> None:
    note = Payments.operations()["note"]
    assert note.arguments(note.to_stored_params({"a": 1, "b": {"c": [2]}})) == {"a": 1, "b": {"c": [2]}}


def test_a_credential_as_a_parameter_is_refused_where_it_is_declared() -> None:
    with pytest.raises(InvalidInputError, match="takes the credential 'token' as a parameter"):

        @mutation()
        def send(self: Any, call: Call, *, token: SecretStr) -> None: ...


class Card(BaseModel):
    """A parameter with a credential inside."""

    pin: SecretStr | None


def test_a_credential_inside_a_parameter_is_refused_too() -> None:
    with pytest.raises(InvalidInputError, match="takes the credential 'cards'"):

        @mutation()
        def pay(self: Any, call: Call, *, cards: list[Card]) -> None: ...


def test_redacting_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="redacts 'card', which it does not take"):
        mutation(redact=["card"])(lambda self, call, *, order: None)


def test_operators_see_a_headline_and_parameters_without_redacted_values() -> None:
    params = CHARGE.to_stored_params({"order": "o1", "cents": 5, "card": "4111"})
    assert CHARGE.headline(params) == "Charge 5 cents for o1 to •••"
    assert CHARGE.redaction.value(params)["card"] == "•••"
    note = Payments.operations()["note"]
    assert note.headline({"a": 1}, {"title": "Note 1"}, ["o1"]) == "Note 1"
    assert note.headline({"a": 1}, None, ["o1", "o2", "o3", "o4"]) == "o1, o2, o3 and 1 more"


def test_messages_are_scrubbed_of_credentials() -> None:
    assert Payments().scrub("denied: Bearer sk_live_4711") == "denied: Bearer •••"


def test_the_grade_follows_from_key_and_reconcile() -> None:
    operations = Payments.operations()
    grades = {name: operation.grade for name, operation in operations.items() if operation.is_mutation}
    assert grades == {"charge": Grade.A, "note": Grade.D, "refund": Grade.C}


def test_an_operation_reads_its_own_errors_first() -> None:
    refund = Payments.operations()["refund"]
    assert refund.reading(RuntimeError("no such card")).meaning is ErrorMeaning.REFUSED
    assert refund.reading(RuntimeError("odd")).meaning is ErrorMeaning.UNKNOWN


class Priced(BaseModel):
    """A parameter whose model changes what it is given, has an alias and a computed field."""

    model_config = ConfigDict(populate_by_name=True)

    cents: int = Field(alias="amount")

    @field_validator("cents")
    @classmethod
    def _in_cents(cls, value: int) -> int:
        return value * 100

    @computed_field
    def shown(self) -> str:
        return f"{self.cents} cents"


@mutation()
def price(self: Any, call: Call, *, item: Priced, note: str = "today") -> None: ...


def test_validators_run_once_at_the_call() -> None:
    written = price.to_stored_params({"item": {"amount": 5}})
    assert written == {"item": {"amount": 5}, "note": "today"}
    assert price.to_stored_params(written) == written
    assert price.arguments(written)["item"].cents == 500


def test_a_model_parameter_is_stored_so_that_it_can_be_read_back() -> None:
    @mutation()
    def keep(self: Any, call: Call, *, item: Aliased) -> None: ...

    written = keep.to_stored_params({"item": Aliased(amount=5)})
    assert written == {"item": {"amount": 5}}
    assert keep.arguments(written)["item"] == Aliased(amount=5)


class Aliased(BaseModel):
    """A parameter with an alias and a computed field."""

    cents: int = Field(alias="amount")

    @computed_field
    def shown(self) -> str:
        return f"{self.cents} cents"


def test_an_errors_function_that_fails_means_unknown() -> None:
    @mutation(errors=lambda error: 1 / 0)  # type: ignore[arg-type,return-value]
    def send(self: Any, call: Call) -> None: ...

    assert send.reading(LogicError("no")).meaning is ErrorMeaning.UNKNOWN


def test_redacted_values_of_any_type_are_removed_from_texts() -> None:
    @mutation(redact=["card"])
    def pay(self: Any, call: Call, *, card: dict[str, Any]) -> None: ...

    text = "no account 41112222 for Ada Lovelace"
    assert (
        pay.redaction.text(text, {"card": {"number": 41112222, "names": ["Ada Lovelace"]}}) == "no account ••• for •••"
    )


def test_a_call_knows_how_long_it_may_still_take() -> None:
    assert timedelta(seconds=4) < Call.within("k", timedelta(seconds=5)).remaining <= timedelta(seconds=5)
    assert Call(idempotency_key="k", ends_at=0.0).remaining == timedelta(0)


class Settings(BaseModel):
    """What a program was configured with."""

    key: SecretStr
    others: dict[str, list[SecretBytes]] = {}


@dataclass(frozen=True, slots=True)
class Login:
    """A credential in a slot."""

    password: SecretStr


class Guarded(Connector):
    """A connector that keeps credentials wherever one may be kept."""

    __slots__ = ("pin",)
    name = "guarded"
    token = SecretStr("of-the-class")

    def __init__(self) -> None:
        self.pin = SecretStr("in-a-slot")
        self.settings = Settings(key=SecretStr("in-settings"), others={"old": [SecretBytes(b"in-a-list")]})
        self.login = Login(SecretStr("in-a-data-class"))
        self.longer = Secret("in-settings-and-longer")
        self.empty = SecretStr("")
        self.me = self


class Inherited(Guarded):
    """A connector whose credentials are those of another."""


@pytest.mark.parametrize("connector", [Guarded(), Inherited()])
@pytest.mark.parametrize(
    "secret",
    ["of-the-class", "in-a-slot", "in-settings", "in-a-list", "in-a-data-class", "in-settings-and-longer"],
)
def test_messages_are_scrubbed_of_credentials_wherever_the_connector_keeps_them(
    connector: Connector, secret: str
) -> None:
    assert connector.scrub(f"POST /charge?key={secret} timed out") == "POST /charge?key=••• timed out"


@pytest.mark.parametrize(
    ("shows", "expected"),
    [
        ("Charge {cents:.2f}", "{cents:.2f}"),
        ("Charge {cnets}", "'cnets'"),
        ("Charge {order[id]}", "'order[id]'"),
        ("Charge {order.id}", "'order.id'"),
        ("Charge {}", "''"),
        ("Charge {order", "expected '}'"),
        ("Charge {order!x}", "{order!x}"),
        ("Charge {order:{cents}}", "{order:{cents}}"),
    ],
)
def test_a_shows_text_that_cannot_be_formatted_is_refused_at_its_declaration(shows: str, expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:

        @mutation(shows=shows)
        def charge(self: Any, call: Call, *, order: str, cents: int) -> None: ...

    assert expected in str(caught.value)


def test_a_shows_text_may_format_its_values() -> None:
    @mutation(shows="{order!r:>6} {cents:.2} {{}}")
    def charge(self: Any, call: Call, *, order: str, cents: int) -> None: ...

    assert charge.headline({"order": "o1", "cents": 1234}) == "  'o1' 12 {}"


def test_a_shows_text_leaves_out_missing_parameters_of_an_open_operation() -> None:
    @mutation(shows="Note {a} {b}")
    def note(self: Any, call: Call, **anything: Any) -> None: ...

    assert note.headline({"a": 1}) == "Note 1 "


def test_a_shows_text_that_fails_later_becomes_the_title_of_the_plan() -> None:
    @mutation()
    def charge(self: Any, call: Call, *, order: str) -> None: ...

    charge.shows = "Charge {order:d}"
    assert charge.headline({"order": "o1"}, {"title": "Order o1"}) == "Order o1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shown": "card"}, "declares to be shown 'card', a text"),
        ({"shown": ["card"], "redact": ["card"]}, "redacts 'card' and declares it to be shown"),
        ({"look_up": "ftp://pay.example/{key}"}, "expected a link with https:// or http://"),
        ({"look_up": "https://{order}/x"}, "a fixed host"),
        ({"look_up": "https://ada:x@pay.example/{key}"}, "without a user"),
        ({"look_up": "https://pay.example/{key"}, "expected '}'"),
        ({"look_up": "https://pay.example/{key!r}"}, "without formats"),
        ({"look_up": "https://pay.example/{oder}"}, "it does not take 'oder'; expected one of: key, order"),
        ({"look_up": "https://pay.example/{card}"}, "'card' is hidden"),
        ({"value": "cents"}, "value without four_eyes_above"),
        ({"four_eyes_above": 5}, "or the reverse"),
        ({"value": "sum", "four_eyes_above": 5}, "has value 'sum', which it does not take"),
        ({"value": "order", "four_eyes_above": 5}, "'order', which is no number"),
        ({"value": "cents", "four_eyes_above": "5"}, "expected an int or a Decimal"),
        ({"value": "cents", "four_eyes_above": True}, "expected an int or a Decimal"),
    ],
)
def test_wrong_options_about_showing_are_refused_at_the_declaration(options: dict[str, Any], expected: str) -> None:
    def charge(self: Any, call: Call, *, order: str, cents: int, card: str = "") -> None: ...

    with pytest.raises(InvalidInputError) as caught:
        mutation(**options)(charge)
    assert expected in str(caught.value)


def test_the_value_may_be_any_kind_of_number_or_inside_a_parameter() -> None:
    def charge(
        self: Any, call: Call, *, cents: int | None, euros: Annotated[Decimal, "sum"], data: dict[str, Any]
    ) -> None: ...

    for value in ("cents", "euros", "data.sum"):
        assert mutation(value=value, four_eyes_above=5)(charge).value == value
    assert mutation(value="data.sum", four_eyes_above=5)(charge).four_eyes_value({"data": {"sum": 6}}) == 6


def test_an_operation_with_a_parameter_that_looks_like_a_secret_hides_something() -> None:
    @mutation()
    def pay(self: Any, call: Call, *, card_number: str) -> None: ...

    @mutation(shown=["card_number"])
    def show(self: Any, call: Call, *, card_number: str) -> None: ...

    assert (pay.has_hidden_params, show.has_hidden_params) == (True, False)


def test_decorators_of_operations_work_with_and_without_parentheses() -> None:
    class Shop(Connector):
        name = "shop"

        @read
        def find(self, *, order: str) -> str:
            return order

        @read()
        def list(self) -> str:
            return ""

        @mutation
        def ship(self, call: Call, *, order: str) -> None: ...

        @mutation()
        def cancel(self, call: Call, *, order: str) -> None: ...

        @ship.reconcile
        def find_parcel(self, call: Call, *, order: str) -> Verdict:
            del call, order
            return Applied()

    found = Shop.operations()
    assert {name: each.is_mutation for name, each in found.items()} == {
        "find": False,
        "list": False,
        "ship": True,
        "cancel": True,
    }
    assert found["ship"].timeout == found["cancel"].timeout
    assert found["ship"].can_reconcile
    for decorator in (mutation, read):
        with pytest.raises(InvalidInputError, match="was given 30; expected a method, or options by their names"):
            decorator(30)  # type: ignore[call-overload]
