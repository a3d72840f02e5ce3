"""Describe an outside system: its reads, its mutations, and how to reconcile a mutation.

A connector is a class with a name. Its operations are methods marked ``read`` or ``mutation``. Their
parameters are keyword arguments with annotations, which are checked before anything is stored. A mutation
gets a ``Call`` with an idempotency key and a deadline. The operation's ``errors`` reads its exceptions, and
``pipeline.connectors.error_table`` reads those that are left. An error that neither knows leaves the outcome unknown.

Credentials are ``SecretStr`` attributes of the connector, of its class or of its settings. They are never
parameters, and they are removed from every message about an operation.
"""

import copy
import functools
import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args, overload

from pydantic import BaseModel, ConfigDict, SecretBytes, SecretStr, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_jsonable_python

from pipeline.connectors.declaration_checks import (
    fetch_problem,
    look_up_problem,
    option_problem,
    overriding_method,
    reconcile_problem,
    shows_problem,
    value_problem,
)
from pipeline.connectors.error_table import bounded_pause, read_error
from pipeline.connectors.secrets import secret_values
from pipeline.domain.errors import InvalidInputError, LogicError
from pipeline.domain.operations import Grade, four_eyes_value, headline
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading
from pipeline.domain.redaction import HIDDEN, Redaction
from pipeline.domain.values import checked_cost, total_cost

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=Callable[..., Any])

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attempt at a mutation, as its connector sees it."""

    idempotency_key: str
    ends_at: float  #: on this process's monotonic clock
    _costs: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def within(cls, idempotency_key: str, limit: timedelta) -> Self:
        """Return a call whose deadline is ``limit`` from now."""
        return cls(idempotency_key=idempotency_key, ends_at=time.monotonic() + limit.total_seconds())

    @property
    def remaining(self) -> timedelta:
        """How long the connector may still take. At zero it must not send anything."""
        return timedelta(seconds=max(0.0, self.ends_at - time.monotonic()))

    def add_cost(self, amount: Decimal | int) -> None:
        """Add to the cost of the run. A wrong amount raises nothing here: the outcome must not depend on it."""
        self._costs.append(amount)

    @property
    def cost(self) -> Decimal | None:
        """What was reported so far; None if nothing. Raises ``LogicError`` if an amount is not a cost."""
        return total_cost([checked_cost(amount) for amount in self._costs])


@dataclass(slots=True)
class Operation(Generic[F]):
    """A marked method of a connector."""

    function: F
    is_mutation: bool
    timeout: timedelta = timedelta(seconds=30)
    settle: timedelta = timedelta(0)
    keyed: bool = False  #: the outside system honours the key: many requests with one key have one effect
    key_lifetime: timedelta | None = None  #: how long it keeps a key; None: not declared
    policy: ReconcilePolicy = field(default_factory=ReconcilePolicy)
    retry: MutationRetryPolicy = field(default_factory=MutationRetryPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    redact: frozenset[str] = frozenset()  #: parameters that are never shown
    shown: frozenset[str] = frozenset()  #: names that look like secrets and may be shown
    shows: str = ""  #: the line that operators read, with parameters in braces
    look_up: str = ""  #: the link to the effect in the outside system, with the key and parameters in braces
    value: str = ""  #: the parameter with the value of a request
    four_eyes_above: Decimal | int | None = None  #: above this value two people must decide
    errors: Callable[[BaseException], ErrorReading | None] | None = None
    reconcile_function: Callable[..., Any] | None = None
    fetch_function: Callable[..., Any] | None = None
    name: str = ""
    signature: inspect.Signature = field(init=False)
    model: type[BaseModel] = field(init=False)
    result_type: Any = field(init=False)  #: what it returns, by its annotation; ``Any``: nothing is declared
    redaction: Redaction = field(init=False)

    def __post_init__(self) -> None:
        self._refuse(option_problem(functools.partial(getattr, self)))
        self.signature = inspect.signature(self.function)
        hints = inspect.get_annotations(self.function, eval_str=True)
        self.model = _params_model(self.function, self.signature, hints, skip=2 if self.is_mutation else 1)
        self.result_type = hints.get("return", Any)
        wrong = sorted(set(self.redact) - set(self.model.model_fields))
        if wrong and not self._accepts_extra:
            self._refuse(f"redacts {wrong[0]!r}, which it does not take")
        both = sorted(self.redact & self.shown)
        if both:
            self._refuse(f"redacts {both[0]!r} and declares it to be shown; expected one of the two")
        self.redaction = Redaction(hidden=self.redact, shown=self.shown)
        names, anything = self.model.model_fields, self._accepts_extra
        self._refuse(shows_problem(self.shows, names, takes_anything=anything))
        self._refuse(look_up_problem(self.look_up, names, self.redaction, takes_anything=anything))
        self._refuse(value_problem(self.value, self.four_eyes_above, hints, names))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def reconcile(self, function: R) -> R:
        """Mark the method that reconciles this mutation. A subclass overrides it by its name."""
        if self.reconcile_function is not None:
            known = getattr(self.reconcile_function, "__name__", "another method")
            self._refuse(f"has the reconcile method {known} already; expected a subclass to override that by its name")
        self.set_reconcile_function(function)
        return function

    def set_reconcile_function(self, function: Callable[..., Any]) -> None:
        """Reconcile by this method. Refuses one that does not take the parameters of the mutation."""
        if not self._accepts_extra:
            self._refuse(reconcile_problem(function, self.model.model_fields))
        self.reconcile_function = function

    def fetch(self, function: R) -> R:
        """Mark the method that fetches the result of this mutation by the outside system's id.

        An operator who saw the effect gives that id. The method takes the call and ``external_id``. It returns what the
        mutation would have returned, or ``NotFound``. A subclass overrides it by its name.
        """
        if self.fetch_function is not None:
            known = getattr(self.fetch_function, "__name__", "another method")
            self._refuse(f"has the fetch method {known} already; expected a subclass to override that by its name")
        self.set_fetch_function(function)
        return function

    def set_fetch_function(self, function: Callable[..., Any]) -> None:
        """Fetch results by this method. Refuses one that does not take ``external_id``."""
        self._refuse(fetch_problem(function))
        self.fetch_function = function

    @property
    def can_reconcile(self) -> bool:
        return self.reconcile_function is not None

    @property
    def can_fetch(self) -> bool:
        return self.fetch_function is not None

    @property
    def grade(self) -> Grade:
        """The grade that the declaration gives."""
        return Grade.of(keyed=self.keyed, can_reconcile=self.can_reconcile)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, without the connector and the call."""
        return tuple(self.signature.parameters)[2 if self.is_mutation else 1 :]

    def to_stored_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters as they are stored: as JSON, with today's defaults. Refuses those that do not fit.

        The values of the caller are stored, not the results of validators. Validators run once, at the call.
        """
        self._validate(params)
        defaults = {name: known.default for name, known in self.model.model_fields.items() if not known.is_required()}
        written = {name: self._to_json(name, value) for name, value in {**defaults, **params}.items()}
        self._validate(written)
        return written

    def arguments(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the function: the stored parameters, read from JSON into the declared types."""
        fitting = self._validate(params)
        return {name: getattr(fitting, name) for name in (*type(fitting).model_fields, *(fitting.model_extra or ()))}

    def reading(self, error: BaseException) -> ErrorReading:
        """Classify an error of this operation. If ``errors`` itself fails, the outcome is unknown."""
        try:
            own = self.errors(error) if self.errors else None
            read = own if isinstance(own, ErrorReading) else read_error(error)
            return ErrorReading(meaning=ErrorMeaning(read.meaning), after=bounded_pause(read.after))
        except Exception:
            log.exception("%s could not classify its own error; the outcome is unknown", self.name)
            return ErrorReading(meaning=ErrorMeaning.UNKNOWN)

    @property
    def has_hidden_params(self) -> bool:
        """Whether a parameter is never shown, because it is redacted or looks like a secret."""
        return bool(self.redact) or any(self.redaction.hides(name) for name in self.model.model_fields)

    def headline(self, params: Mapping[str, Any], ui: Any = None, message_ids: Sequence[str] = ()) -> str:
        """Describe in one redacted line what a request does. ``ui`` is what its prepare decided to show."""
        title = ui.get("title") if isinstance(ui, dict) else None
        return headline(self.shows, params, self.redaction, title=title, message_ids=message_ids)

    def four_eyes_value(self, params: Mapping[str, Any]) -> Decimal | None:
        """Return the value of a request that two people must decide about; None: one person is enough."""
        return four_eyes_value(self.value, self.four_eyes_above, params)

    def _to_json(self, name: str, value: Any) -> Any:
        """Return a value as JSON. Without a declared type it must be JSON already, which is checked later."""
        known = self.model.model_fields.get(name)
        if known is None or known.annotation is Any:
            return value
        try:
            if isinstance(value, BaseModel):
                return value.model_dump(mode="json", by_alias=True, round_trip=True)
            return to_jsonable_python(value, by_alias=True)
        except PydanticSerializationError as error:
            raise LogicError(f"{self.name} was given a {name} that cannot be stored: {error}") from None

    def _refuse(self, problem: str) -> None:
        if problem:
            raise InvalidInputError(f"{getattr(self.function, '__qualname__', self.function)} {problem}.")

    @property
    def _accepts_extra(self) -> bool:
        return self.model.model_config.get("extra") == "allow"

    def _validate(self, params: Mapping[str, Any]) -> BaseModel:
        try:
            return self.model.model_validate(dict(params))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])  # a misspelt name
            place = ".".join(str(part) for part in first["loc"])
            if first["type"] == "missing":
                raise LogicError(f"{self.name} was not given {place}, which has no default") from None
            known = ", ".join(self.parameters) or "none"
            raise LogicError(f"{self.name} was given a wrong {place}: {first['msg']}; it takes: {known}") from None


@overload
def read(function: F, /) -> Operation[F]: ...
@overload
def read() -> Callable[[F], Operation[F]]: ...
def read(function: Any = None, /) -> Any:
    """Mark a method that only reads. ``@read`` and ``@read()`` are the same."""

    def mark(function: F) -> Operation[F]:
        return Operation(function=_marked(function, "read"), is_mutation=False)

    return mark if function is None else mark(function)


@overload
def mutation(
    *,
    timeout: timedelta = ...,
    settle: timedelta = ...,
    keyed: bool = ...,
    key_lifetime: timedelta | None = ...,
    policy: ReconcilePolicy | None = ...,
    retry: MutationRetryPolicy | None = ...,
    breaker: BreakerPolicy | None = ...,
    redact: Collection[str] = ...,
    shown: Collection[str] = ...,
    shows: str = ...,
    look_up: str = ...,
    value: str = ...,
    four_eyes_above: Decimal | int | None = ...,
    errors: Callable[[BaseException], ErrorReading | None] | None = ...,
) -> Callable[[F], Operation[F]]: ...
@overload
def mutation(function: F, /) -> Operation[F]: ...
def mutation(  # noqa: PLR0913 - each is a fact about an operation, given by name
    function: Any = None,
    /,
    *,
    timeout: timedelta = timedelta(seconds=30),
    settle: timedelta = timedelta(minutes=1),
    keyed: bool = False,
    key_lifetime: timedelta | None = None,
    policy: ReconcilePolicy | None = None,
    retry: MutationRetryPolicy | None = None,
    breaker: BreakerPolicy | None = None,
    redact: Collection[str] = (),
    shown: Collection[str] = (),
    shows: str = "",
    look_up: str = "",
    value: str = "",
    four_eyes_above: Decimal | int | None = None,
    errors: Callable[[BaseException], ErrorReading | None] | None = None,
) -> Any:
    """Mark a method that changes the outside system. ``@mutation`` is ``@mutation()``: every option has its default.

    - ``timeout`` bounds one call.
    - ``settle`` is how long a change may take to become visible. Until then, not finding it proves nothing. Zero is
      right only if every change is visible by the time its call could have been answered.
    - ``keyed`` says that the outside system honours the idempotency key: all requests with one key have one effect.
      The same request for the same inputs keeps its key until the outside system itself has refused it.
    - ``key_lifetime`` is how long the outside system keeps a key. A later repeat may happen twice. None: it is not
      declared, and the key is taken to be kept.
    - ``redact`` names fields that are never shown, at any depth. Fields that look like secrets or cards are hidden
      without it; ``shown`` names those of them that may be shown.
    - ``shows`` is the headline of a request, with parameters in braces.
    - ``look_up`` is the link to the effect in the outside system, with ``{key}`` and parameters in braces.
    - ``value`` names the parameter with the value of a request. Above ``four_eyes_above`` two people must decide.
    - ``errors`` reads the operation's own exceptions. Those that it returns None for are read as usual.
    """

    def mark(function: F) -> Operation[F]:
        return Operation(
            function=_marked(function, "mutation"),
            is_mutation=True,
            timeout=timeout,
            settle=settle,
            keyed=keyed,
            key_lifetime=key_lifetime,
            policy=policy or ReconcilePolicy(),
            retry=retry or MutationRetryPolicy(),
            breaker=breaker or BreakerPolicy(),
            redact=_names(function, "redacts", redact),
            shown=_names(function, "declares to be shown", shown),
            shows=shows,
            look_up=look_up,
            value=value,
            four_eyes_above=four_eyes_above,
            errors=errors,
        )

    return mark if function is None else mark(function)


def _marked(function: F, decorator: str) -> F:
    """Return the method that a decorator marks; refuse anything else, such as an option without its name."""
    if not callable(function) or isinstance(function, type):
        raise InvalidInputError(f"@{decorator} was given {function!r}; expected a method, or options by their names.")
    return function


class Connector:
    """An adapter to one outside system. Subclasses name themselves and mark their operations."""

    name: str = ""
    _operations: ClassVar[dict[str, Operation[Any]]]

    @classmethod
    def operations(cls) -> dict[str, Operation[Any]]:
        """Return all operations by name. They are collected once per class."""
        known = cls.__dict__.get("_operations")
        if known is None:
            found = (inspect.getattr_static(cls, name) for name in dir(cls))
            known = {each.name: _for_class(cls, each) for each in found if isinstance(each, Operation)}
            cls._operations = known
        return known

    def scrub(self, text: str) -> str:
        """Return the text without this connector's credentials."""
        for secret in secret_values(self):
            text = text.replace(secret, HIDDEN)
        return text


def _names(function: Callable[..., Any], verb: str, names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise InvalidInputError(f"{function.__qualname__} {verb} {names!r}, a text; expected the names in a list.")
    return frozenset(names)


def _for_class(cls: type, operation: Operation[Any]) -> Operation[Any]:
    """Return the operation with the reconcile and fetch methods that this class has under those names."""
    reconcile = operation.reconcile_function and overriding_method(cls, operation.reconcile_function)
    fetch = operation.fetch_function and overriding_method(cls, operation.fetch_function)
    if reconcile is operation.reconcile_function and fetch is operation.fetch_function:
        return operation
    own = copy.copy(operation)
    if reconcile is not None:
        own.set_reconcile_function(reconcile)
    if fetch is not None:
        own.set_fetch_function(fetch)
    return own


def _holds_secret(kind: Any) -> bool:
    """Return whether an annotation is or contains a type for credentials."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return any(_holds_secret(known.annotation) for known in kind.model_fields.values())
    return kind in (SecretStr, SecretBytes) or any(_holds_secret(inner) for inner in get_args(kind))


def _params_model(
    function: Callable[..., Any], signature: inspect.Signature, hints: Mapping[str, Any], skip: int
) -> type[BaseModel]:
    """Return the parameters of an operation as a model. Refuses credentials, which belong to the connector."""
    fields: dict[str, Any] = {}
    extra = "forbid"
    for name, parameter in list(signature.parameters.items())[skip:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra = "allow"
            continue
        kind = hints.get(name, Any)
        if _holds_secret(kind):
            raise InvalidInputError(
                f"{function.__qualname__} takes the credential {name!r} as a parameter, which would be stored; "
                "expected it as an attribute of the connector, from settings."
            )
        fields[name] = (kind, ... if parameter.default is inspect.Parameter.empty else parameter.default)
    config = ConfigDict(extra=extra, arbitrary_types_allowed=False, protected_namespaces=())  # type: ignore[typeddict-item]
    return create_model(function.__name__, __config__=config, **fields)
