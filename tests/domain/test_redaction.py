"""Which names are hidden, and what is left of values and texts."""

import pytest

from pipeline.domain.redaction import BY_NAME, HIDDEN, Redaction, is_secret_name, leaf_texts


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "userPassword",
        "db_passwd",
        "pwd",
        "clientSecret",
        "secret_key",
        "token",
        "accessToken",
        "refresh_tokens",
        "Authorization",
        "authorization-header",
        "api_key",
        "apikey",
        "X-API-Key",
        "private_key",
        "IBAN",
        "iban",
        "card",
        "cardNumber",
        "card_holder",
        "creditcard",
        "cards",
        "pan",
        "cvv",
        "cvv2",
        "cvc",
        "pin",
        "PIN",
        "ssn",
        "social_security_number",
        "account_number",
        "sort_code",
        "otp",
        "bearer",
        "jwt",
        "cookie",
        "passphrase",
        "credentials",
    ],
)
def test_a_name_that_looks_like_a_secret_is_hidden(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "order",
        "cents",
        "to",
        "amount",
        "company",
        "panel",
        "spinning",
        "discard",
        "postcard",
        "author",
        "authored",
        "key",
        "keyboard",
        "accounts",
        "number",
        "code",
        "pinned",
        "expansion",
        "shipping",
        "opinion",
        "auto_kennel",
        "idempotency_key",
        "n",
        "4",
    ],
)
def test_an_ordinary_name_is_shown(name: str) -> None:
    assert not is_secret_name(name)


def test_hidden_fields_are_replaced_at_any_depth_and_the_rest_is_kept() -> None:
    given = {
        "order": "o1",
        "lines": [{"sku": "a", "token": "t0"}, ("x", {"pin": 1})],
        "customer": {"name": "Ada", "card": {"number": 1}},
        "note": "n",
        "api_key": None,
    }
    assert Redaction(hidden=frozenset({"note", "name"})).value(given) == {
        "order": "o1",
        "lines": [{"sku": "a", "token": HIDDEN}, ["x", {"pin": HIDDEN}]],
        "customer": {"name": HIDDEN, "card": HIDDEN},
        "note": HIDDEN,
        "api_key": HIDDEN,
    }


def test_a_name_that_is_declared_to_be_shown_is_shown_and_what_is_inside_it_is_judged_by_its_own_name() -> None:
    redaction = Redaction(shown=frozenset({"card", "max_tokens"}))
    assert redaction.value({"max_tokens": 5, "card": {"brand": "visa", "cvv": "123"}}) == {
        "max_tokens": 5,
        "card": {"brand": "visa", "cvv": HIDDEN},
    }


def test_a_text_loses_the_hidden_values_of_its_parameters_also_where_one_contains_another() -> None:
    params = {"card": "4242", "deep": [{"token": "4242-4242"}], "cvv": "123", "order": "o-4711"}
    text = "card 4242-4242 or 4242 with 123 refused for o-4711"
    assert BY_NAME.text(text, params) == f"card {HIDDEN} or {HIDDEN} with 123 refused for o-4711", "123 is too short"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("POST /pay?api_key=abc&order=1 failed", f"POST /pay?api_key={HIDDEN}&order=1 failed"),
        ('{"password": "hunter2", "n": 1}', f'{{"password": "{HIDDEN}", "n": 1}}'),
        ("{'token': 'x1y2'}", f"{{'token': '{HIDDEN}'}}"),
        ("Authorization: Bearer ab.cd refused", f"Authorization: {HIDDEN} refused"),
        ("token: expired", "token: expired"),
        ("order=4711 is unknown", "order=4711 is unknown"),
    ],
)
def test_a_text_loses_the_values_that_it_names_itself(text: str, expected: str) -> None:
    assert BY_NAME.text(text) == expected


def test_leaves_are_texts_and_numbers() -> None:
    assert list(leaf_texts({"a": ["x", 1, None, "", True, {"b": 2.5}]})) == ["x", "1", "2.5"]
    assert list(BY_NAME.hidden_texts(["x", {"pin": [7, 8]}])) == ["7", "8"]
