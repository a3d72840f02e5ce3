"""Settings: read once from `PIPELINE_*` variables, checked as a whole, then frozen and passed on.

A process with a wrong setting does not start. Its error lists every problem with the variable, what was expected and
what was found. Passwords are in none of these messages. A `PIPELINE_*` variable that resembles a setting is a problem
too: a misspelt name would otherwise leave a default in force. Any other unknown name is logged: CI systems set some.
"""

import base64
import ipaddress
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

log = logging.getLogger(__name__)

DISTRIBUTION = "celery-durable-effects"  #: what pip installs; the package and the command are called pipeline
PREFIX = "PIPELINE_"
APP_VARIABLE = f"{PREFIX}APP"
QUEUE_PREFIX = "pipeline"
MAX_QUEUE_PREFIX = 60  #: characters
#: time between the soft time limit of a task and the end of its process
TIME_LIMIT_GRACE = timedelta(seconds=15)
DURATION = "a duration such as 30s, 5m, 1h, 1m30s, PT30S or a number of seconds"
DATABASE_URL = "postgresql://user:password@host:5432/name"
BROKER_URL = "redis://:password@host:6379/0, sentinel://:password@host:26379/0 or amqp://user:password@host:5672/vhost"
OTLP_ENDPOINT = "http://collector:4318, without /v1/traces"
WEB_URL = "https://host/path"
TRACE_URL = "https://host/path/{trace_id}"
OIDC_ISSUER = "https://host/path, the issuer of the provider"
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_ISO = TypeAdapter(timedelta)
_RESEMBLANCE = 0.75  #: how alike, from 0 to 1, an unknown name and a setting are if the name is a misspelling
_ignored_names: set[str] = set()

EXIT_USAGE = 2  #: exit code of a command that was called with what it cannot accept
EXIT_DATABASE = 3  #: exit code of a command whose database is unreachable or at another version
EXIT_NOT_FOUND = 5  #: exit code of a command that was given an unknown name or id
EXIT_REFUSED = 6  #: exit code of an act that was refused, or that was formed on a state that has changed
EXIT_UNSAFE = 78  #: exit code of a process that must not start: an operator must change something first
EXIT_ATTENTION = 4  #: exit code of a check that found something that waits for an operator
EXIT_RESTART = 75  #: exit code of a process that should be started again: a restart may help
_EXPECTED = {  #: what a field expects, by pydantic's type of error
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "invalid_key": "text as the name of a field",
    "model_type": "a table",
    "string_type": "text",
}


def package_version() -> str:
    """Return the version that is installed."""
    from importlib import metadata  # slow to import: it loads `email`

    return metadata.version(DISTRIBUTION)


class SettingsError(ValueError):
    """The settings cannot be used; `problems` has one sentence for each problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(("the settings cannot be used:", *(f"- {each}" for each in self.problems))))


class SettingRow(NamedTuple):
    """One setting as text; secrets are masked."""

    variable: str
    value: str
    default: str
    meaning: str


class _ContradictionError(ValueError):
    """Settings that are valid alone and contradict each other."""

    def __init__(self, found: list[tuple[frozenset[str], str]]) -> None:
        self.found = found
        super().__init__("; ".join(sentence for _, sentence in found))


def _duration(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return timedelta(seconds=float(text))
        if re.fullmatch(f"(?:{_PART.pattern}\\s*)+", text):
            return timedelta(seconds=sum(float(number) * UNITS[unit] for number, unit in _PART.findall(text)))
        if text.startswith("p"):
            return _ISO.validate_python(text.upper())
    except (ValidationError, OverflowError):
        pass
    raise ValueError(f"expected {DURATION}")


def _within(least: str, most: str) -> AfterValidator:
    """Return a check that a duration is in a range."""

    def check(value: timedelta) -> timedelta:
        if not _ISO.validate_python(_duration(least)) <= value <= _ISO.validate_python(_duration(most)):
            raise ValueError(f"expected a duration from {least} to {most}")
        return value

    return AfterValidator(check)


def _split_url(value: str, expected: str) -> SplitResult:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:  # its text could quote a part of the password
        raise ValueError(f"expected {expected}, with special characters of user and password percent-encoded") from None
    return parts


def database_url_of(value: str) -> str:
    """Return the URL of a Postgres for our driver; it accepts every spelling of the scheme."""
    parts = _split_url(value, DATABASE_URL)
    if parts.scheme not in ("postgres", "postgresql", "postgresql+psycopg2"):
        raise ValueError(f"expected {DATABASE_URL}")
    if len(parts.path) < 2:
        raise ValueError(f"expected {DATABASE_URL}, with the name of the database")
    return f"postgresql+psycopg2:{value.partition(':')[2]}"


def _broker_url(value: str) -> str:
    for url in value.split(";") if value.startswith("sentinel") else (value,):  # one URL per Sentinel
        parts = _split_url(url, BROKER_URL)
        if parts.scheme not in ("redis", "rediss", "sentinel", "amqp", "amqps") or not parts.hostname:
            raise ValueError(f"expected {BROKER_URL}")
    return value


def _web_url(value: str) -> str:
    parts = _split_url(value, WEB_URL)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f"expected {WEB_URL}")
    return value


def _trace_url(value: str) -> str:
    if value and "{trace_id}" not in _web_url(value):
        raise ValueError(f"expected {TRACE_URL}")
    return value


def is_loopback(host: str | None) -> bool:
    """Return whether a host name or address is this machine."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _notify_secret(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    try:
        base64.b64decode(text.removeprefix("whsec_") if text.startswith("whsec_") else "", validate=True)
    except ValueError:
        raise ValueError("expected base64 behind whsec_, or a secret that does not begin with whsec_") from None
    return value


def _otlp_endpoint(value: str) -> str:
    parts = _split_url(value, OTLP_ENDPOINT)
    is_too_long = parts.path.rstrip("/").endswith(("/v1/traces", "/v1/metrics"))  # the exporter adds them
    if value and (parts.scheme not in ("http", "https") or not parts.hostname or is_too_long):
        raise ValueError(f"expected {OTLP_ENDPOINT}")
    return value


def _issuer(value: str) -> str:
    parts = _split_url(value, OIDC_ISSUER)
    is_local = parts.scheme == "http" and is_loopback(parts.hostname)
    if value and not (parts.hostname and (parts.scheme == "https" or is_local)):
        raise ValueError(f"expected {OIDC_ISSUER}")
    return value


def _networks(values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(value)) for value in values)
    except ValueError:
        raise ValueError("expected addresses or networks separated by commas, such as 10.0.0.5,10.1.0.0/16") from None


def _header(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError("expected the name of an HTTP header, such as X-Forwarded-User")
    return value


def _names(value: object) -> object:
    if isinstance(value, str):
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return value


def _app(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?", value):
        raise ValueError("expected a Celery app as `celery -A` names it, such as shop.celery:app")
    return value


def _queue_prefix(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", value) or len(value) > MAX_QUEUE_PREFIX:
        raise ValueError(
            f"expected letters, digits, _ and - in parts separated by dots, at most {MAX_QUEUE_PREFIX} characters"
        )
    return value


def _importable(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("expected importable modules separated by commas, such as shop.billing,shop.mail")
    return names


Duration = Annotated[timedelta, Field(gt=timedelta(0)), BeforeValidator(_duration)]
DurationFrom1s = Annotated[Duration, _within("1s", "1d")]
DurationFrom100ms = Annotated[Duration, _within("100ms", "1d")]
PositiveInt = Annotated[int, Field(gt=0)]
HeaderName = Annotated[str, AfterValidator(_header)]


class Settings(BaseSettings):
    """Every setting of a process; the field `lease` is the variable `PIPELINE_LEASE`.

    Only `load` reads the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=True
    )

    database_url: Annotated[str, AfterValidator(database_url_of)] = Field(
        default="postgresql+psycopg2://localhost/pipeline",
        repr=False,
        description="the Postgres database that holds all state",
    )
    broker_url: Annotated[str, AfterValidator(_broker_url)] = Field(
        default="redis://localhost:6379/0",
        repr=False,
        description="the broker that carries Celery's messages: a Redis number or virtual host of this database's own",
    )
    broker_primary: str = Field(
        default="", description="name of the primary Redis at Redis Sentinel; only with sentinel://"
    )
    app: Annotated[str, AfterValidator(_app)] = Field(
        default="",
        description="the Celery app that Pipeline is installed in, as `celery -A` names it; commands use it; "
        "unset: our own app",
    )
    queue_prefix: Annotated[str, AfterValidator(_queue_prefix)] = Field(
        default=QUEUE_PREFIX,
        description="first part of the names of our queues; another one lets several installations share a broker",
    )
    workflows: Annotated[tuple[str, ...], BeforeValidator(_names), AfterValidator(_importable)] = Field(
        default=(), description="modules that define workflows, separated by commas"
    )
    code_version: str = Field(
        default="",
        description="the version of your code, such as a commit: a new version ends maintenance; "
        "unset: derived from the source files of the packages with handlers",
    )
    lease: DurationFrom1s = Field(
        default=timedelta(seconds=8), description="how long a run belongs to a worker that does not renew its lease"
    )
    heartbeat: DurationFrom100ms = Field(
        default=timedelta(seconds=2), description="how often a worker renews its leases"
    )
    visibility_timeout: Annotated[Duration, _within("1s", "7d")] = Field(
        default=timedelta(minutes=10),
        description="after which time the Redis broker delivers an unacknowledged message again",
    )
    prepare_time_limit: DurationFrom1s = Field(
        default=timedelta(seconds=60), description="time for the prepare task of one cohort"
    )
    mutate_time_limit: DurationFrom1s = Field(
        default=timedelta(seconds=120), description="time for the mutate task of one cohort"
    )
    next_time_limit: DurationFrom1s = Field(
        default=timedelta(seconds=60), description="time for the next task of one cohort"
    )
    mutation_concurrency: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=100, description="mutations that a worker process sends at the same time, at most"
    )
    max_cohort_size: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=200, description="runs in one cohort, at most, when there is a backlog"
    )
    redispatch_after: DurationFrom100ms = Field(
        default=timedelta(seconds=60),
        description="how long a run may wait for a worker before its task is dispatched again",
    )
    stall_timeout: DurationFrom1s = Field(
        default=timedelta(seconds=60),
        description="how long a worker may be idle while messages wait for it before it ends itself with exit code 75",
    )
    tick: Annotated[Duration, _within("100ms", "1h")] = Field(
        default=timedelta(seconds=5),
        description="how often beat dispatches the tick; the periods of all other sweeps are proportional to it",
    )
    allowed_unsafe_settings: Annotated[
        tuple[Literal["fsync", "full_page_writes", "synchronous_commit"], ...], BeforeValidator(_names)
    ] = Field(
        default=(),
        description="settings of Postgres that may be unsafe, separated by commas: fsync, full_page_writes, "
        "synchronous_commit; a worker does not start with any other, since a crash could forget effects",
    )
    notify_url: Annotated[str, AfterValidator(_web_url)] = Field(
        default="", repr=False, description="where notices for operators are posted; unset: they are only logged"
    )
    notify_secret: Annotated[SecretStr, AfterValidator(_notify_secret)] = Field(
        default=SecretStr(""),
        description="secret that signs posted notices, as Standard Webhooks does; required with a URL",
    )
    notify_plain_http: bool = Field(
        default=False, description="notices may be posted over plain http to another machine, where all can read them"
    )
    step_time_limit: DurationFrom100ms = Field(
        default=timedelta(seconds=30), description="time for one call of one handler"
    )
    pool_size: Annotated[int, Field(ge=1, le=500)] = Field(
        default=5, description="database connections a process keeps open"
    )
    max_payload_bytes: PositiveInt = Field(default=256 * 1024, description="largest payload of an event, as JSON")
    max_state_bytes: PositiveInt = Field(default=64 * 1024, description="largest state of a handler, as JSON")
    max_prepare_result_bytes: PositiveInt = Field(
        default=1024 * 1024, description="largest result of a prepare phase, as JSON"
    )
    codec_keys: SecretStr = Field(
        default=SecretStr(""),
        description="keys of encrypted workflows as `id:base64`, the newest first, separated by commas",
    )
    codec_keys_file: Path | None = Field(
        default=None, description="a file with these keys, one on a line, in place of the keys themselves"
    )
    liveness_file: Path | None = Field(
        default=None,
        description="a file that workers, beat, ingest and consume touch every few seconds; one per process",
    )
    otlp_endpoint: Annotated[str, AfterValidator(_otlp_endpoint)] = Field(
        default="",
        repr=False,
        description="the OTLP collector (HTTP) for spans, and for metrics if no metrics port is set; unset: none",
    )
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="port on which workers, ingest and consume serve Prometheus; unset: none"
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        description="address of the interface of the metrics port; 0.0.0.0 for a Prometheus on another machine",
    )
    log_format: Literal["pretty", "json", "short"] = Field(
        default="pretty",
        description="format of log lines of workers, beat and ingest: text, one JSON object per line, or `short`, as "
        "`pipeline dev` shows them: a line per outcome, without single steps and tasks",
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = Field(
        default=None, description="lowest level of our own log lines; unset: the value of `--loglevel`"
    )
    api_trusted_proxies: Annotated[tuple[str, ...], BeforeValidator(_names), AfterValidator(_networks)] = Field(
        default=(),
        description="addresses or networks of the proxies in front of `pipeline api`, separated by commas; "
        "`X-Forwarded-For`, `-Proto`, `-Host` and the headers below are accepted from no other address",
    )
    api_identity_header: HeaderName = Field(
        default="", description="header in which a trusted proxy names the person who logged in; unset: none"
    )
    api_groups_header: HeaderName = Field(
        default="", description="header in which a trusted proxy lists the person's groups, separated by commas"
    )
    api_roles: str = Field(
        default="",
        description="roles by group, for the groups header and OpenID Connect; the first rule that fits counts: "
        "`oncall=operator+payloads,shop-team=viewer@shop;mail,*=viewer`",
    )
    api_login_lifetime: Annotated[Duration, _within("1m", "30d")] = Field(
        default=timedelta(hours=12), description="how long a login to the console lasts at most"
    )
    api_login_idle: Annotated[Duration, _within("1m", "30d")] = Field(
        default=timedelta(hours=2), description="after which time without a request a login to the console ends"
    )
    api_max_body_bytes: PositiveInt = Field(default=1024 * 1024, description="largest body of a request to the API")
    api_max_upload_bytes: PositiveInt = Field(
        default=32 * 1024 * 1024, description="largest file that is uploaded to an import"
    )
    console_url: Annotated[str, AfterValidator(_web_url)] = Field(
        default="",
        description="address of the console in a browser, for `pipeline open`; unset: the console that `pipeline dev` "
        "runs in this folder, else http://127.0.0.1:8080",
    )
    flower_url: Annotated[str, AfterValidator(_web_url)] = Field(
        default="", description="address of Flower in a browser, for a link in the console; unset: no link"
    )
    trace_url: Annotated[str, AfterValidator(_trace_url)] = Field(
        default="",
        description="address of a trace in a browser, with `{trace_id}` in it, for links in the console; unset: none",
    )
    oidc_issuer: Annotated[str, AfterValidator(_issuer)] = Field(
        default="", description="issuer of the OpenID Connect provider for logins to the console; unset: none"
    )
    oidc_client_id: str = Field(default="", description="id of this client at the OpenID Connect provider")
    oidc_client_secret: SecretStr = Field(
        default=SecretStr(""),
        description="secret of this client at the OpenID Connect provider; unset: a public client",
    )
    oidc_name_claim: str = Field(
        default="email", description="claim of the ID token that names the person; `email` must be verified"
    )
    oidc_groups_claim: str = Field(default="groups", description="claim of the ID token that lists the person's groups")
    home: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default=Path(".pipeline"), description="folder of the data and logs of the embedded servers"
    )
    postgres_bin: Path | None = Field(
        default=None, description="directory of the postgres and initdb to embed; unset: those of the locked wheel"
    )
    redis_bin: Path | None = Field(
        default=None, description="the redis-server to embed; unset: the server of the locked wheel"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use arguments only: `load` alone reads the environment, once."""
        return (init_settings,)

    @classmethod
    def load(cls, environ: Mapping[str, str], defaults: Mapping[str, Any] | None = None) -> Self:
        """Read the settings, or raise an error with every problem. An empty variable counts as unset.

        ``defaults`` replace those of the fields.
        """
        fields = {f"{PREFIX}{name.upper()}": name for name in cls.model_fields}
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value.strip()}
        problems = _misspelt_settings([name for name in given if name not in fields], cls.model_fields)
        values: dict[str, Any] = dict(defaults or {})
        values |= {fields[name]: value for name, value in given.items() if name in fields}
        settings = None
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems += _problems(error, values)
        if settings is None or problems:
            raise SettingsError(problems)
        return settings

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if found := list(_contradictions(self)):
            raise _ContradictionError(found)
        return self

    def describe(self) -> list[SettingRow]:
        """Return every setting with its value, its default and its meaning."""
        return [
            SettingRow(
                _variable(name), _shown(name, getattr(self, name)), _display(field.default), field.description or ""
            )
            for name, field in type(self).model_fields.items()
        ]


def _contradictions(settings: Settings) -> Iterator[tuple[frozenset[str], str]]:
    """Yield each contradiction with the names of its fields."""
    if settings.heartbeat * 3 > settings.lease:
        yield (
            frozenset({"heartbeat", "lease"}),
            f"{_variable('heartbeat')}: expected at most a third of {_variable('lease')} "
            f"({_display(settings.lease)}), so that one late beat does not lose the lease, "
            f"got {_display(settings.heartbeat)}",
        )
    if settings.broker_url.startswith("sentinel") != bool(settings.broker_primary):
        yield (
            frozenset({"broker_url", "broker_primary"}),
            f"{_variable('broker_primary')}: expected a name if and only if {_variable('broker_url')} is sentinel://…, "
            f"got {settings.broker_primary!r}",
        )
    if settings.codec_keys.get_secret_value() and settings.codec_keys_file:
        yield (
            frozenset({"codec_keys", "codec_keys_file"}),
            f"{_variable('codec_keys')}: expected either the keys or {_variable('codec_keys_file')}, got both",
        )
    yield from _notify_contradictions(settings)
    for name in ("prepare_time_limit", "next_time_limit"):
        if settings.step_time_limit * 2 > getattr(settings, name):
            yield (
                frozenset({name, "step_time_limit"}),
                f"{_variable('step_time_limit')}: expected at most half of {_variable(name)} "
                f"({_display(getattr(settings, name))}), so that a slow step ends before its cohort is ended, "
                f"got {_display(settings.step_time_limit)}",
            )
    for name in ("prepare_time_limit", "mutate_time_limit", "next_time_limit"):
        limit: timedelta = getattr(settings, name)
        if limit + TIME_LIMIT_GRACE >= settings.visibility_timeout:
            yield (
                frozenset({name, "visibility_timeout"}),
                f"{_variable(name)}: expected less than {_variable('visibility_timeout')} "
                f"({_display(settings.visibility_timeout)}) minus {_display(TIME_LIMIT_GRACE)}, so no message "
                f"is delivered again while its task still runs, got {_display(limit)}",
            )


def _access_contradictions(settings: Settings) -> Iterator[tuple[frozenset[str], str]]:
    """Yield each contradiction about who may call the API."""
    needed = (
        ("api_identity_header", "api_trusted_proxies", "the proxies that may send it"),
        ("api_identity_header", "api_roles", "the roles of the persons it names"),
        ("api_groups_header", "api_identity_header", "the header that names the person"),
        ("oidc_issuer", "oidc_client_id", "the id of this client"),
        ("oidc_issuer", "api_roles", "the roles of the persons who log in"),
    )
    for given, other, why in needed:
        if getattr(settings, given) and not getattr(settings, other):
            yield (
                frozenset({given, other}),
                f"{_variable(other)}: expected {why} beside {_variable(given)}, got nothing",
            )
    if settings.api_login_idle > settings.api_login_lifetime:
        yield (
            frozenset({"api_login_idle", "api_login_lifetime"}),
            f"{_variable('api_login_idle')}: expected at most {_variable('api_login_lifetime')} "
            f"({_display(settings.api_login_lifetime)}), got {_display(settings.api_login_idle)}",
        )


def _notify_contradictions(settings: Settings) -> Iterator[tuple[frozenset[str], str]]:
    if settings.notify_url and not settings.notify_secret.get_secret_value():
        yield (
            frozenset({"notify_url", "notify_secret"}),
            f"{_variable('notify_secret')}: expected a secret beside {_variable('notify_url')}, so that the receiver "
            "can check who sent a notice, got nothing",
        )
    yield from _access_contradictions(settings)
    url = urlsplit(settings.notify_url)
    if url.scheme == "http" and not is_loopback(url.hostname) and not settings.notify_plain_http:
        yield (
            frozenset({"notify_url", "notify_plain_http"}),
            f"{_variable('notify_url')}: expected https for another machine than this one, so that no one on the way "
            f"reads notices, got http; {_variable('notify_plain_http')}=true allows it",
        )


def _problems(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """Return one sentence per problem: first wrong values, then contradictions."""
    wrong = {str(each["loc"][0]): expectation(each) for each in error.errors() if each["loc"]}
    sentences = [_sentence(name, expected, str(values[name])) for name, expected in wrong.items()]
    if wrong:  # only valid values can be compared
        try:
            Settings(**{name: value for name, value in values.items() if name not in wrong})
        except ValidationError as rest:
            error = rest
    for each in error.errors():
        contradiction = each.get("ctx", {}).get("error")
        if isinstance(contradiction, _ContradictionError):
            sentences += [sentence for names, sentence in contradiction.found if names.isdisjoint(wrong)]
    return sentences


def expectation(error: Any) -> str:
    """Return what pydantic expected of a value, with the same text for settings and for policies."""
    if wanted := _EXPECTED.get(error["type"]):
        return f"expected {wanted}"
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "expected", 1)


def _sentence(name: str, expected: str, value: str) -> str:
    got = _kind_of_url(value) if name.endswith(("_url", "_endpoint")) else repr(value)
    if Settings.model_fields[name].annotation is SecretStr:
        got = "another secret"
    return f"{_variable(name)}: {expected}, got {got}"


def _kind_of_url(value: str) -> str:
    """Describe a wrong URL by its scheme only: the rest may be a part of a password."""
    scheme, separator, _ = value.partition("://")
    return f"{scheme}://…" if separator and re.fullmatch(r"[\w+.-]+", scheme) else "something that is not a URL"


def _misspelt_settings(unknown: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each unknown name that resembles a setting. The others are logged, once per process."""
    sentences: list[str] = []
    for name in unknown:
        near = get_close_matches(name.removeprefix(PREFIX).lower(), known, n=1, cutoff=_RESEMBLANCE)
        if near:
            sentences.append(f"{name}: not a setting; did you mean {_variable(near[0])}?")
        elif name not in _ignored_names:
            _ignored_names.add(name)
            log.warning("%s is not a setting and is ignored", name)
    return sentences


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _display(value: object) -> str:
    """Return a value as it is written in the environment, without secrets."""
    match value:
        case None:
            return ""
        case timedelta():
            return _short_duration(value)
        case tuple():
            return ",".join(value)
        case str() if "://" in value:
            return ";".join(map(_without_password, value.split(";") if value.startswith("sentinel") else [value]))
    return str(value)


def _shown(name: str, value: object) -> str:
    """Return the value of a setting as it may be shown. The path of a webhook is often its secret."""
    text = _display(value)
    if name != "notify_url" or not text:
        return text
    parts = urlsplit(text)
    return parts._replace(path="/***" if parts.path.strip("/") else parts.path, query="").geturl()


def _short_duration(value: timedelta) -> str:
    seconds = value.total_seconds()
    for unit in ("d", "h", "m", "s"):
        if seconds % UNITS[unit] == 0:
            return f"{seconds / UNITS[unit]:.0f}{unit}"
    return f"{seconds:g}s"


def _without_password(url: str) -> str:
    """The URL without any password, whether it stands before the host or among the options."""
    parts = urlsplit(url)
    account, at, host = parts.netloc.rpartition("@")
    user, colon, _ = account.partition(":")
    query = re.sub(r"(password[^=&]*=)[^&]*", r"\1***", parts.query, flags=re.IGNORECASE)
    return parts._replace(netloc=f"{user}{colon}{'***' if colon else ''}{at}{host}", query=query).geturl()
