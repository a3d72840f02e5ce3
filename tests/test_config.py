"""Settings: what is read, what is refused, and with which message."""

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import Settings, SettingsError

SECRET = "hunter2"


def problems(**values: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        Settings.load({f"PIPELINE_{name.upper()}": value for name, value in values.items()})
    return caught.value.problems


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.load({}) == Settings()


def test_variables_of_others_and_empty_ones_are_not_read() -> None:
    assert Settings.load({"LEASE": "1s", "PATH": "/bin", "PIPELINE_LEASE": "  "}) == Settings()


def test_building_by_hand_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_LEASE", "5m")
    assert Settings().lease == timedelta(seconds=8)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        Settings().lease = timedelta(seconds=1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90.5", 90.5),
        ("90s", 90),
        ("2m", 120),
        ("1h", 3600),
        ("1d", 86400),
        ("1m30s", 90),
        ("1h 30m", 5400),
        ("90500ms", 90.5),
        ("PT90S", 90),
        ("pt2m", 120),
        (" 2 M ", 120),
    ],
)
def test_durations_are_read_in_every_documented_form(text: str, seconds: float) -> None:
    assert Settings.load({"PIPELINE_LEASE": text}).lease == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["soon", "-5s", "5 weeks", "s", "5s5", "P", "1e3", "9" * 40, "9" * 40 + "d"])
def test_text_that_is_no_duration_is_refused_with_examples(text: str) -> None:
    (problem,) = problems(lease=text)
    assert problem.startswith("PIPELINE_LEASE: expected a duration such as 30s, 5m, 1h")
    assert problem.endswith(f"got {text!r}")


def test_a_duration_of_nothing_is_refused() -> None:
    (problem,) = problems(visibility_timeout="0")
    assert problem.startswith("PIPELINE_VISIBILITY_TIMEOUT: expected greater than 0")


@pytest.mark.parametrize(
    ("name", "value", "least", "most"),
    [
        ("lease", "400000000d", "1s", "1d"),
        ("lease", "1ms", "1s", "1d"),
        ("heartbeat", "0.1ms", "100ms", "1d"),
        ("redispatch_after", "900000000d", "100ms", "1d"),
        ("redispatch_after", "1ms", "100ms", "1d"),
        ("stall_timeout", "1ms", "1s", "1d"),
        ("tick", "1ms", "100ms", "1h"),
        ("tick", "3000d", "100ms", "1h"),
        ("visibility_timeout", "3000d", "1s", "7d"),
        ("mutate_time_limit", "1ms", "1s", "1d"),
        ("step_time_limit", "1ms", "100ms", "1d"),
    ],
)
def test_a_duration_that_makes_no_sense_is_refused_with_the_range_that_does(
    name: str, value: str, least: str, most: str
) -> None:
    assert problems(**{name: value}) == (
        f"PIPELINE_{name.upper()}: expected a duration from {least} to {most}, got {value!r}",
    )


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_every_spelling_of_a_postgres_url_means_the_driver_we_ship(scheme: str) -> None:
    settings = Settings.load({"PIPELINE_DATABASE_URL": f"{scheme}://me:pw@db:5432/shop?sslmode=require"})
    assert settings.database_url == "postgresql+psycopg2://me:pw@db:5432/shop?sslmode=require"


@pytest.mark.parametrize("url", ["redis://h", "rediss://:pw@h:6380/1", "amqp://me:pw@h:5672/v", "amqps://h"])
def test_redis_and_amqp_brokers_are_taken_as_they_are(url: str) -> None:
    assert Settings.load({"PIPELINE_BROKER_URL": url}).broker_url == url


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://root:{SECRET}@db/shop",
        f"postgresql+asyncpg://root:{SECRET}@db/shop",
        f"postgresql://root:{SECRET}@db",
        f"postgresql://root:{SECRET}/x@db/shop",
        f"root:{SECRET}@db/shop",
        f"root:{SECRET}://db/shop",
        f"postgresql://root:{SECRET}@[db/shop",
        SECRET,
    ],
)
@pytest.mark.parametrize("name", ["database_url", "broker_url"])
def test_a_wrong_url_is_refused_without_repeating_its_password(name: str, url: str) -> None:
    (problem,) = problems(**{name: url})
    assert problem.startswith(f"PIPELINE_{name.upper()}: expected ")
    assert SECRET not in problem


@pytest.mark.parametrize("path", ["/v1/traces", "/otlp/v1/traces/", "/v1/metrics"])
def test_an_endpoint_to_which_the_last_part_would_be_added_twice_is_refused(path: str) -> None:
    (problem,) = problems(otlp_endpoint=f"http://collector:4318{path}")
    assert "without /v1/traces" in problem
    for fine in ("", "http://collector:4318", "https://collector/otlp/"):
        assert Settings.load({"PIPELINE_OTLP_ENDPOINT": fine}).otlp_endpoint == fine


@given(st.text(min_size=1).filter(str.strip))
def test_reading_any_text_as_a_url_raises_only_our_error(text: str) -> None:
    try:
        Settings.load({"PIPELINE_DATABASE_URL": text, "PIPELINE_BROKER_URL": text})
    except SettingsError as error:
        assert error.problems  # noqa: PT017 - most texts are refused, some are URLs


def test_workflows_are_modules_separated_by_commas() -> None:
    assert Settings.load({"PIPELINE_WORKFLOWS": "shop.billing, shop.mail,"}).workflows == (
        "shop.billing",
        "shop.mail",
    )
    (problem,) = problems(workflows="shop/billing.py")
    assert problem.startswith("PIPELINE_WORKFLOWS: expected importable modules")


def test_a_misspelt_variable_is_refused_with_the_nearest_name() -> None:
    assert problems(hartbeat="5s") == ("PIPELINE_HARTBEAT: not a setting; did you mean PIPELINE_HEARTBEAT?",)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("pool_size", "many", "PIPELINE_POOL_SIZE: expected a whole number, got 'many'"),
        ("pool_size", "0", "PIPELINE_POOL_SIZE: expected greater than or equal to 1, got '0'"),
        ("max_state_bytes", "-1", "PIPELINE_MAX_STATE_BYTES: expected greater than 0, got '-1'"),
    ],
)
def test_an_error_names_the_variable_the_expected_and_the_found_value(name: str, value: str, expected: str) -> None:
    assert problems(**{name: value}) == (expected,)


def test_a_heartbeat_must_come_three_times_within_a_lease() -> None:
    (problem,) = problems(lease="20s", heartbeat="7s")
    assert problem.startswith("PIPELINE_HEARTBEAT: expected at most a third of PIPELINE_LEASE (20s)")
    assert problem.endswith("got 7s")
    assert Settings(lease=timedelta(seconds=21), heartbeat=timedelta(seconds=7))


@pytest.mark.parametrize("phase", ["prepare", "mutate", "next"])
def test_a_message_is_not_delivered_again_while_its_task_may_still_run(phase: str) -> None:
    (problem,) = problems(**{f"{phase}_time_limit": "10m"})
    assert problem.startswith(f"PIPELINE_{phase.upper()}_TIME_LIMIT: expected less than PIPELINE_VISIBILITY_")


def test_every_problem_is_listed_at_once() -> None:
    found = problems(
        hartbeat="1s", max_cohort_size="x", pool_size="x", mutate_time_limit="1h", database_url="mysql://db/shop"
    )
    named = [problem.partition(":")[0].removeprefix("PIPELINE_") for problem in found]
    assert named == ["HARTBEAT", "DATABASE_URL", "MAX_COHORT_SIZE", "POOL_SIZE", "MUTATE_TIME_LIMIT"]


def test_a_value_that_is_wrong_anyway_is_not_compared_with_others() -> None:
    (problem,) = problems(lease="soon", heartbeat="45s")
    assert problem.startswith("PIPELINE_LEASE")


def test_neither_the_representation_nor_the_error_chain_shows_a_password() -> None:
    url = f"postgresql://me:{SECRET}@db/shop"
    settings = Settings(database_url=url, broker_url=f"redis://:{SECRET}@h/0")
    assert SECRET not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        Settings.load({"PIPELINE_DATABASE_URL": f"{url}", "PIPELINE_POOL_SIZE": "x"})
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_the_description_has_every_setting_with_its_secrets_masked() -> None:
    settings = Settings(
        database_url=f"postgresql://me:{SECRET}@db/shop?sslpassword={SECRET}&x=1",
        broker_url=f"redis://:{SECRET}@h/0",
        lease=timedelta(seconds=90),
        workflows=("a.b", "c"),
        home=Path("/srv/home"),
    )
    rows = {row.variable: row for row in settings.describe()}
    assert len(rows) == len(Settings.model_fields)
    assert rows["PIPELINE_DATABASE_URL"].value == "postgresql+psycopg2://me:***@db/shop?sslpassword=***&x=1"
    assert rows["PIPELINE_BROKER_URL"].value == "redis://:***@h/0"
    assert rows["PIPELINE_LEASE"][1:3] == ("90s", "8s")
    assert rows["PIPELINE_WORKFLOWS"].value == "a.b,c"
    assert rows["PIPELINE_HOME"].value == "/srv/home"
    assert all(row.meaning for row in rows.values())


@given(
    st.sampled_from(["lease", "prepare_time_limit", "next_time_limit"]),
    st.integers(min_value=31_000, max_value=500_000),
)
def test_a_described_duration_can_be_written_back(name: str, milliseconds: int) -> None:
    environ = {f"PIPELINE_{name.upper()}": f"{milliseconds}ms", "PIPELINE_STEP_TIME_LIMIT": "10s"}
    settings = Settings.load(environ)
    assert Settings.load({row.variable: row.value for row in settings.describe()}) == settings


def test_a_variable_that_resembles_no_setting_is_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("PIPELINE_WORKSPACE", "PIPELINE_ID", "PIPELINE_SOURCE"):
        for _ in range(2):
            assert Settings.load({name: "set by a CI system"}) == Settings.load({})
        assert caplog.text.count(f"{name} is not a setting and is ignored") == 1


def test_notices_go_over_plain_http_only_to_this_machine_or_if_allowed() -> None:
    secret = {"notify_secret": "s"}
    assert problems(notify_url="http://hooks.example/x", **secret)[0].startswith("PIPELINE_NOTIFY_URL: expected https")
    for url in ("https://hooks.example/x", "http://localhost:8080/x", "http://127.0.0.1/x", "http://[::1]/x"):
        assert Settings.load({"PIPELINE_NOTIFY_URL": url, "PIPELINE_NOTIFY_SECRET": "s"}).notify_url == url
    allowed = {
        "PIPELINE_NOTIFY_URL": "http://hooks/x",
        "PIPELINE_NOTIFY_SECRET": "s",
        "PIPELINE_NOTIFY_PLAIN_HTTP": "1",
    }
    assert Settings.load(allowed).notify_plain_http


def test_a_secret_that_only_seems_to_be_base64_is_refused_without_being_shown() -> None:
    (problem,) = problems(notify_secret="whsec_not base64!")
    assert problem == (
        "PIPELINE_NOTIFY_SECRET: expected base64 behind whsec_, or a secret that does not begin with whsec_, "
        "got another secret"
    )


def test_addresses_for_browsers_are_checked() -> None:
    given = {"PIPELINE_TRACE_URL": "https://traces/{trace_id}", "PIPELINE_FLOWER_URL": "http://127.0.0.1:5555"}
    assert Settings.load(given).trace_url == "https://traces/{trace_id}"
    assert problems(console_url="ops.example.org") == (
        "PIPELINE_CONSOLE_URL: expected https://host/path, got something that is not a URL",
    )
    assert problems(trace_url="https://traces/") == (
        "PIPELINE_TRACE_URL: expected https://host/path/{trace_id}, got https://…",
    )
