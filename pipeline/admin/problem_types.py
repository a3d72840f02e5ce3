"""List every problem that people meet: its slug, its HTTP status and the exit code of the command.

The API answers with the slug and the status, the command line ends with the exit code. An error class is looked up by
its nearest base that is listed here.
"""

from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from pipeline.config import EXIT_DATABASE, EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNSAFE, EXIT_USAGE, SettingsError
from pipeline.domain.errors import (
    ClaimedNameError,
    HandlerError,
    IllegalTransitionError,
    InvalidInputError,
    MissingKeyError,
    NotFoundError,
    OutdatedCodeError,
    PayloadError,
    PipelineError,
    QuietPeriodError,
    RefusedError,
    ReservationError,
    SchemaVersionError,
    SecondApprovalError,
    StaleWriteError,
    StateChangedError,
    TamperedError,
    UnavailableError,
    UnresolvedError,
)
from pipeline.store.database import is_full

TYPE_PREFIX = "urn:pipeline:problem:"  #: of the `type` in answers of the API


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemType:
    """One kind of problem, as the API and the command line report it."""

    slug: str  #: stable name; the API's `type` is `urn:pipeline:problem:` and this name
    title: str
    status: int  #: of HTTP
    exit_code: int | None = None  #: of the command; null: only the API reports it
    errors: tuple[type[Exception], ...] = ()


PROBLEM_TYPES = (
    ProblemType(
        slug="invalid-input",
        title="What was given cannot be accepted",
        status=422,
        exit_code=EXIT_USAGE,
        errors=(InvalidInputError,),
    ),
    ProblemType(
        slug="payload-refused",
        title="A value is not JSON, or too large",
        status=422,
        exit_code=EXIT_USAGE,
        errors=(PayloadError,),
    ),
    ProblemType(
        slug="not-found",
        title="There is no such thing",
        status=404,
        exit_code=EXIT_NOT_FOUND,
        errors=(NotFoundError,),
    ),
    ProblemType(
        slug="illegal-transition",
        title="The current state does not allow it",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(IllegalTransitionError,),
    ),
    ProblemType(
        slug="state-changed",
        title="It has changed since it was shown",
        status=412,
        exit_code=EXIT_REFUSED,
        errors=(StateChangedError,),
    ),
    ProblemType(
        slug="stale-write",
        title="Another writer came first",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(StaleWriteError, ReservationError),
    ),
    ProblemType(
        slug="quiet-period",
        title="The request may still arrive",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(QuietPeriodError,),
    ),
    ProblemType(
        slug="second-approval",
        title="Another person must confirm it",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(SecondApprovalError,),
    ),
    ProblemType(
        slug="claimed-name",
        title="Two authenticated people must decide",
        status=403,
        exit_code=EXIT_REFUSED,
        errors=(ClaimedNameError,),
    ),
    ProblemType(
        slug="unresolved-outcome",
        title="An unknown outcome must be resolved first",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(UnresolvedError,),
    ),
    ProblemType(
        slug="outdated-code",
        title="Newer code is registered",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(OutdatedCodeError,),
    ),
    ProblemType(
        slug="outside-system",
        title="A connector or a handler failed",
        status=502,
        exit_code=EXIT_REFUSED,
        errors=(HandlerError,),
    ),
    ProblemType(
        slug="encrypted",
        title="An encrypted value cannot be read or written here",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(MissingKeyError, TamperedError),
    ),
    ProblemType(
        slug="schema-version",
        title="The database has another schema version",
        status=503,
        exit_code=EXIT_DATABASE,
        errors=(SchemaVersionError,),
    ),
    ProblemType(
        slug="database-unavailable",
        title="The database or the broker cannot be used now",
        status=503,
        exit_code=EXIT_DATABASE,
        errors=(DBAPIError, PoolTimeoutError, UnavailableError),
    ),
    ProblemType(
        slug="wrong-settings",
        title="The settings cannot be used",
        status=500,
        exit_code=EXIT_UNSAFE,
        errors=(SettingsError,),
    ),
    ProblemType(
        slug="refused",
        title="It was refused",
        status=409,
        exit_code=EXIT_REFUSED,
        errors=(PipelineError, RefusedError),
    ),
    ProblemType(slug="unauthenticated", title="Log in first", status=401),
    ProblemType(slug="forbidden", title="Your role does not allow it", status=403),
    ProblemType(slug="cross-site", title="The request came from another site", status=403),
    ProblemType(slug="csrf-token", title="The CSRF token is missing or wrong", status=403),
    ProblemType(slug="untrusted-proxy", title="An untrusted address named a person", status=403),
    ProblemType(slug="login-failed", title="The login failed", status=400),
    ProblemType(slug="identity-provider", title="The identity provider did not answer", status=502),
    ProblemType(slug="too-many-logins", title="Too many logins failed", status=429),
    ProblemType(slug="invalid-request", title="The request is not as documented", status=422),
    ProblemType(slug="bad-request", title="The request cannot be read", status=400),
    ProblemType(slug="no-such-page", title="There is no such address", status=404),
    ProblemType(slug="method-not-allowed", title="The address has no such method", status=405),
    ProblemType(slug="too-large", title="The body is too large", status=413),
    ProblemType(slug="precondition-required", title="The state that was shown is missing", status=428),
    ProblemType(slug="idempotency-key-reused", title="The key belongs to another request", status=422),
    ProblemType(slug="request-in-progress", title="The same request is being executed", status=409),
    ProblemType(slug="not-here", title="This process cannot do it", status=409),
    ProblemType(slug="internal", title="The server failed", status=500),
)
BY_SLUG = {each.slug: each for each in PROBLEM_TYPES}
_BY_ERROR = {kind: each for each in PROBLEM_TYPES for kind in each.errors}


def problem_type(error: BaseException) -> ProblemType | None:
    """Return the type of an expected error by its nearest listed base; None for any other error."""
    return next((_BY_ERROR[kind] for kind in type(error).__mro__ if kind in _BY_ERROR), None)


def database_sentence(error: BaseException) -> str:
    """Return a sentence about a database that cannot be used, without what its message may quote."""
    if is_full(error):
        return (
            "Postgres has no free connection: all that it allows (max_connections, or the limit of a role or database) "
            "are taken. Repeat the request later; if it stays so, end processes or raise the limit."
        )
    return "The database did not do it."


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that ended with an expected error."""
    kind = problem_type(error)
    return EXIT_REFUSED if kind is None or kind.exit_code is None else kind.exit_code
