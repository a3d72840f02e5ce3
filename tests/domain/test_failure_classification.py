"""Reading an exception as a failure, once and for all kinds."""

import inspect
import json
import ssl

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.domain import errors
from pipeline.domain.errors import AuthError, HandlerError, LogicError, PipelineError, StaleWriteError, TransientError
from pipeline.domain.failures import Failure, FailureKind, classify

SAID = {TransientError: FailureKind.TRANSIENT, AuthError: FailureKind.AUTH, LogicError: FailureKind.LOGIC}


def raised_by(code: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, is what each case is about
        exec(compile(code, "handler.py", "exec"), {})
    return caught.value


@pytest.mark.parametrize(("error", "kind"), SAID.items())
def test_a_failure_kind_raised_by_a_handler_is_used(error: type[HandlerError], kind: FailureKind) -> None:
    class Special(error):  # type: ignore[misc, valid-type]
        pass

    assert classify(error("no")).kind is kind
    assert classify(Special("no")).kind is kind


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "assert False",
        "None.name",
        "{}['missing']",
        "[][0]",
        "unknown_name",
        "def f():\n  print(x)\n  x = 1\nf()",
        "1 + ''",
        "int('x')",
        "raise NotImplementedError",
        "import no_such_module",
        "exec('1 +')",
        "b'\\xff'.decode()",
        "def f(): f()\nf()",
        "import json; json.loads('{')",
        "2.0 ** 10_000",
    ],
)
def test_wrong_code_is_a_logic_failure(code: str) -> None:
    assert classify(raised_by(code)).kind is FailureKind.LOGIC


def test_a_value_that_does_not_fit_its_model_is_a_logic_failure() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("x")
    assert classify(caught.value).kind is FailureKind.LOGIC


@pytest.mark.parametrize(
    "error",
    [OSError("disk"), ConnectionResetError("reset"), TimeoutError("slow"), RuntimeError("odd"), Exception("vague")],
)
def test_an_unknown_exception_is_a_transient_failure(error: Exception) -> None:
    assert classify(error).kind is FailureKind.TRANSIENT


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_a_stop_signal_is_no_failure_of_the_handler(error: BaseException) -> None:
    assert classify(error).kind is FailureKind.TRANSIENT


def test_a_host_without_memory_is_an_internal_failure() -> None:
    assert classify(MemoryError()).kind is FailureKind.INTERNAL


def test_a_rule_of_the_host_that_a_handler_broke_is_a_logic_failure() -> None:
    error = StaleWriteError("run", "r", verb="commit", expected="fence 1", found="fence 2")
    assert classify(error).kind is FailureKind.LOGIC


@pytest.mark.parametrize(
    "error", [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PipelineError)]
)
def test_every_error_of_ours_has_a_failure_kind_of_its_own(error: type[PipelineError]) -> None:
    expected = next((kind for said, kind in SAID.items() if issubclass(error, said)), FailureKind.LOGIC)
    assert classify(error.__new__(error)).kind is expected


def test_a_failure_keeps_the_message_and_the_type_of_its_error() -> None:
    assert classify(TransientError("the mail server is away", code=451)) == Failure(
        kind=FailureKind.TRANSIENT, message="the mail server is away", error_type="TransientError"
    )


def test_an_error_without_a_message_is_described_by_its_type() -> None:
    assert classify(ValueError()).message == "ValueError()"


def test_the_type_of_a_nested_class_is_its_qualified_name() -> None:
    error = json.JSONDecodeError("bad", "{", 1)
    assert classify(error).error_type == "JSONDecodeError"

    class Local(Exception):  # noqa: N818 - only its name matters here
        pass

    assert classify(Local("x")).error_type.endswith("<locals>.Local")


class Speechless(Exception):  # noqa: N818 - a handler's own class, as handlers name them
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_whose_message_cannot_be_read_is_still_classified() -> None:
    assert classify(Speechless()).error_type == "Speechless"


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        (ExceptionType.BUSINESS, FailureKind.LOGIC),
        (ExceptionType.SYSTEM, FailureKind.TRANSIENT),
        (ExceptionType.TIMEOUT, FailureKind.TRANSIENT),
    ],
)
def test_the_categories_of_the_engine_are_kinds_of_failure(category: ExceptionType, kind: FailureKind) -> None:
    assert classify(TransactionException("an item failed", category)).kind is kind


class NotJsonError(OSError, ValueError):
    """As clients report a response that is not JSON."""


@pytest.mark.parametrize("error", [ssl.SSLCertVerificationError("certificate has expired"), NotJsonError("no")])
def test_an_error_of_the_network_is_no_mistake_though_it_is_a_value_error_too(error: Exception) -> None:
    assert isinstance(error, ValueError)
    assert classify(error).kind is FailureKind.TRANSIENT
