"""An operation that could not be carried out, or never be asked about, is refused where it is declared."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline import Applied, Call, Connector, NotFound, Retry, Verdict, mutation
from pipeline.domain.errors import InvalidInputError


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"timeout": 20}, "has timeout 20; expected a timedelta"),
        ({"timeout": timedelta(0)}, "has timeout 0:00:00; expected a positive span"),
        ({"settle": 5}, "has settle 5; expected a timedelta"),
        ({"settle": timedelta(seconds=-1)}, "has settle -1 day, 23:59:59; expected no negative span"),
        ({"retry": 3}, "has retry 3; expected a MutationRetryPolicy"),
        ({"policy": 5}, "has policy 5; expected a ReconcilePolicy"),
        ({"breaker": True}, "has breaker True; expected a BreakerPolicy"),
        ({"shows": 7}, "has shows 7; expected a str"),
        ({"redact": "n"}, "redacts 'n', a text; expected the names in a list"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused_by_name(facts: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:

        @mutation(**facts)
        def send(self: Any, call: Call, *, n: int) -> None: ...

    assert expected in str(caught.value)
    assert "send" in str(caught.value)


def a_mutation() -> Any:
    @mutation()
    def send(self: Any, call: Call, *, n: int, to: str = "") -> None: ...

    return send


def _other(self: Any, call: Call, *, order: int) -> Verdict: ...  # type: ignore[empty-body]
def _fewer(self: Any, call: Call, *, n: int) -> Verdict: ...  # type: ignore[empty-body]
def _callless(self: Any, *, n: int, to: str) -> Verdict: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("method", [_other, _fewer, _callless])
def test_a_reconcile_that_does_not_take_what_its_mutation_takes_is_refused(method: Any) -> None:
    send = a_mutation()
    with pytest.raises(InvalidInputError, match="cannot be reconciled by"):
        send.reconcile(method)
    assert not send.can_reconcile


def _same(self: Any, call: Call, *, n: int, to: str) -> Verdict: ...  # type: ignore[empty-body]
def _some(self: Any, call: Call, *, n: int, **_: Any) -> Verdict: ...  # type: ignore[empty-body]
def _more(self: Any, call: Call, *, n: int, to: str, page: int = 1) -> Verdict: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("method", [_same, _some, _more])
def test_a_reconcile_that_takes_what_its_mutation_takes_is_bound_to_it(method: Any) -> None:
    send = a_mutation()
    assert send.reconcile(method) is method
    assert send.can_reconcile


def test_the_reconcile_of_an_operation_with_any_parameters_is_not_checked() -> None:
    @mutation()
    def send(self: Any, call: Call, **anything: Any) -> None: ...

    send.reconcile(_other)
    assert send.can_reconcile


def test_a_second_reconcile_is_refused_because_it_would_change_the_base_class_too() -> None:
    send = a_mutation()
    send.reconcile(_same)
    with pytest.raises(InvalidInputError, match="has the reconcile method _same already"):
        send.reconcile(_some)


def _by_id(self: Any, call: Call, *, external_id: str) -> dict[str, str]:
    del self, call
    return {"id": external_id}


def test_a_fetch_that_takes_the_external_id_is_bound_to_its_mutation() -> None:
    send = a_mutation()
    assert not send.can_fetch
    assert send.fetch(_by_id) is _by_id
    assert send.can_fetch
    with pytest.raises(InvalidInputError, match="has the fetch method _by_id already"):
        send.fetch(_by_id)


def test_a_fetch_that_does_not_take_the_external_id_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot fetch its result by _same: .*expected it to take self, call"):
        a_mutation().fetch(_same)


def test_a_subclass_overrides_the_fetch_of_its_base_by_the_name() -> None:
    class Known(Connector):
        name = "known"

        @mutation()
        def send(self, call: Call, *, n: int) -> None: ...

        @send.fetch
        def get(self, call: Call, *, external_id: str) -> None: ...

    class Other(Known):
        def get(self, call: Call, *, external_id: str) -> None: ...

    assert Known.operations()["send"].fetch_function is Known.get
    assert Other.operations()["send"].fetch_function is Other.get
    assert Known.operations()["send"].fetch_function is Known.get, "that of the base stays"


def test_the_type_of_a_result_is_the_annotation_of_the_operation() -> None:
    assert a_mutation().result_type is None
    assert mutation()(lambda self, call: None).result_type is Any


class Base(Connector):
    """A connector that others build on."""

    name = "base"

    @mutation()
    def send(self, call: Call, *, n: int) -> None:
        """Never called here."""

    @send.reconcile
    def find(self, call: Call, *, n: int) -> Verdict:
        """Of the base."""
        del self, call
        return Applied(n)


class Plain(Base):
    """Asks as its base does."""


class Overridden(Base):
    """Asks in its own way."""

    def find(self, call: Call, *, n: int) -> Verdict:
        """Its own."""
        del self, call
        return NotFound(str(n))


class Again(Overridden):
    """Asks in yet another."""

    def find(self, call: Call, *, n: int) -> Verdict:
        """Its own."""
        del self, call
        return Retry(str(n))


@pytest.mark.parametrize(
    ("kind", "verdict"), [(Base, Applied(1)), (Plain, Applied(1)), (Overridden, NotFound("1")), (Again, Retry("1"))]
)
def test_a_reconcile_that_a_subclass_overrides_is_the_one_that_is_called(kind: type[Base], verdict: Verdict) -> None:
    method = kind.operations()["send"].reconcile_function
    assert method is not None
    assert method(kind(), Call.within("key", timedelta(seconds=1)), n=1) == verdict
