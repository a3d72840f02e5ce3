"""The conformance kit passes true connectors and reports the false verdict of others."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pipeline.connectors import Call, Connector, Grade
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.reconciliation import ErrorMeaning, ErrorReading
from pipeline.testing import CASES, Case, FaultyProxy, Subject, check_case, conformance
from pipeline.testing.conformance_suite import run_case
from tests.support.conformance_retries import MORE, patient
from tests.testing import conformance_connectors as these
from tests.testing.conformance_server import World

TIMEOUT = timedelta(milliseconds=300)
#: For calls that have to end well.
LONG = timedelta(seconds=1)

#: Each liar, a case that shows its lie, and words that name it.
LIES: list[tuple[type[these.Base], Case, str]] = [
    (these.SaysRefusedOnReset, Case.RESET_AFTER_SEND, "its error reads 'refused', which says that it did not happen"),
    (these.SaysNotNowOnTimeout, Case.TIMEOUT_AFTER_SEND, "its error reads 'not now', which says that it did not"),
    (these.SaysNotNowOnTimeout, Case.SLOW_COMMIT, "its error reads 'not now', which says that it did not"),
    (these.NeverFinds, Case.RECONCILE_AFTER, "reconcile says NotFound although it is there"),
    (these.NeverFinds, Case.SLOW_COMMIT, "reconcile says NotFound although it is there"),
    (these.TakesSilenceForAbsence, Case.RECONCILE_CUT_OFF, "reconcile says NotFound although it is there"),
    (these.TakesRefusalForAbsence, Case.RECONCILE_CUT_OFF, "reconcile says NotFound although it is there"),
    (these.AlwaysFinds, Case.RECONCILE_BEFORE, "reconcile says Applied, and it is not there"),
    (these.AlwaysFinds, Case.RESET_BEFORE_SEND, "reconcile says Applied, and it is not there"),
    (these.FindsSomethingElse, Case.RECONCILE_AFTER, "that of reconcile has 'thing-of-somebody-else'"),
    (these.AnswersWithAWord, Case.RECONCILE_BEFORE, "reconcile returned 'found it'; expected Applied, NotFound or"),
    (these.SendsToFindOut, Case.RECONCILE_BEFORE, "a reconcile must not send anything"),
    (these.IgnoresTheDeadline, Case.TIMEOUT_BEFORE_SEND, "past its deadline"),
    (these.IgnoresTheDeadline, Case.DRIPPING_ANSWER, "past its deadline"),
    (these.IgnoresTheDeadline, Case.TOO_LATE, "the call sent something after its deadline"),
    (these.SendsAfterTheDeadline, Case.TIMEOUT_BEFORE_SEND, "the call sent something after its deadline"),
    (these.ClaimsToBeKeyed, Case.DUPLICATE, "says that the key is honoured; the same call twice happened 2 times"),
    (these.RetriesInside, Case.RESET_BEFORE_SEND, "one call sent 2 requests: it must not retry inside"),
    (these.RetriesInside, Case.RESET_AFTER_SEND, "it happened 2 times"),
    (these.TellsItsToken, Case.RESET_AFTER_SEND, "a credential stands in an error"),
    (these.ReadsAnErrorAsNo, Case.ERROR_AFTER_COMMIT, "its error reads 'not now', which says that it did not happen"),
    (these.InventsItsResult, Case.TIMEOUT_BEFORE_SEND, "it happened 0 times"),
    (these.SendsTwiceAndComplains, Case.APPLIED, "one call happened 2 times"),
    (these.RefusesASecondTime, Case.DUPLICATE, "the second call reads 'refused': it did not happen; but the first one"),
    (these.ReadsAGatewaysErrorAsNo, Case.ERROR_AFTER_COMMIT, "its error reads 'not now', which says that it did not"),
    (these.ReadsAReplayAsNo, Case.KEY_REPLAY, "the second call reads 'refused': it did not happen; but the first one"),
    (these.ClaimsToBeKeyed, Case.KEY_REPLAY, "the same call again after a lost answer happened 2 times"),
    (these.ReadsATakenKeyAsNo, Case.KEY_OTHER_REQUEST, "a key that is taken means unknown"),
    (these.ReadsAnErrorAsNo, Case.KEY_KEPT_ERROR, "a repeat has the same key and meets the kept error again"),
    (these.ReadsATakenKeyAsNo, Case.KEY_EXPIRED, "the server forgets keys: declare key_lifetime"),
    (these.ShowsItsToken, Case.APPLIED, "a credential stands in the connector's repr"),
    (these.TellsItsTokenWhenAsked, Case.RECONCILE_BEFORE, "a credential stands in a verdict"),
    (
        these.NeverWorks,
        Case.APPLIED,
        "nothing was in its way, and it raised ValueError('cannot make a thing with •••')",
    ),
    (these.TellsItsTokenWhenAsked, Case.RECONCILE_AFTER, "it happened, and reconcile does not find it: Retry"),
]
HONEST = {
    these.HonestA: Grade.A,
    these.HonestB: Grade.B,
    these.HonestC: Grade.C,
    these.HonestStrict: Grade.C,
    these.HonestD: Grade.D,
}


def in_time(test: Callable[[timedelta], None]) -> None:
    """Try with time enough for calls that have to end well, and with far more if the machine stood still."""
    try:
        test(LONG)
    except (AssertionError, pytest.fail.Exception):
        test(MORE * LONG)


def subject(connector: Connector, world: World, proxy: FaultyProxy, **other: Any) -> Subject:
    usual = Subject(
        connector=connector,
        operation="make",
        params={"what": "a thing"},
        effects=world.effects,
        proxy=proxy,
        timeout=TIMEOUT,
        result_parts=["id"],
        other_params={"what": "another thing"},
        forget_keys=world.keys.clear,
    )
    return replace(usual, **other)


@pytest.mark.parametrize(("kind", "grade"), HONEST.items(), ids=lambda value: getattr(value, "name", value))
def test_an_honest_connector_passes_every_case_with_its_grade(
    kind: type[these.Base], grade: Grade, world: World, proxy: FaultyProxy
) -> None:
    report = patient(subject(kind(proxy.url), world, proxy))
    report.require(grade)
    assert report.measured_grade is report.declared_grade is grade
    assert {finding.case for finding in report.results} == set(CASES)


@pytest.mark.parametrize(("kind", "case", "words"), LIES, ids=[f"{kind.name}-{case}" for kind, case, _ in LIES])
def test_a_false_verdict_is_reported(
    kind: type[these.Base], case: Case, words: str, world: World, proxy: FaultyProxy
) -> None:
    for more in (1, 2, 4):
        found = complaint(subject(kind(proxy.url), world, proxy, timeout=more * TIMEOUT), case)
        if words in found:  # on a busy machine a call may run out of time before it can lie
            break
    assert words in found
    assert found.startswith(f"{kind.name}.make, {case}: ")
    assert these.TOKEN not in found


def complaint(tried: Subject, case: Case) -> str:
    """What the kit complains about; nothing when it has no complaint."""
    try:
        check_case(tried, case)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_report_lists_the_result_of_every_case(world: World, proxy: FaultyProxy) -> None:
    report = patient(subject(these.ClaimsToBeKeyed(proxy.url), world, proxy), [Case.APPLIED, Case.DUPLICATE])
    with pytest.raises(AssertionError) as caught:
        report.require()
    assert str(caught.value).splitlines() == [
        "expected grade C and no failure",
        "claims-to-be-keyed.make: declared C, measured D",
        "  applied              pass",
        "  duplicate            fail            it says that the key is honoured; the same call twice happened 2 times",
    ]


def test_a_connector_that_is_honest_about_too_little_does_not_meet_a_higher_grade(
    world: World, proxy: FaultyProxy
) -> None:
    report = patient(subject(these.HonestB(proxy.url), world, proxy), [Case.DUPLICATE, Case.RECONCILE_AFTER])
    report.require()
    report.require(Grade.B)
    with pytest.raises(
        AssertionError, match=r"expected grade A and no failure\nhonest-b\.make: declared B, measured B"
    ):
        report.require(Grade.A)


def test_the_required_grade_cannot_be_less_than_the_declared_one(world: World, proxy: FaultyProxy) -> None:
    report = patient(subject(these.HonestA(proxy.url), world, proxy), [Case.DUPLICATE])
    with pytest.raises(
        AssertionError, match=r"expected grade A and no failure\nhonest-a\.make: declared A, measured C"
    ):
        report.require(Grade.D)


def test_a_reconcile_that_lied_once_counts_for_nothing_in_the_grade(world: World, proxy: FaultyProxy) -> None:
    tried = [Case.DUPLICATE, Case.RECONCILE_BEFORE, Case.RECONCILE_AFTER]
    report = patient(subject(these.AlwaysFinds(proxy.url), world, proxy, timeout=LONG), tried)
    assert [finding.status for finding in report.results] == ["pass", "fail", "pass"]
    assert (report.declared_grade, report.measured_grade) == (Grade.A, Grade.C)


def test_a_grade_that_is_met_does_not_make_up_for_a_failure(world: World, proxy: FaultyProxy) -> None:
    report = patient(subject(these.TellsItsToken(proxy.url), world, proxy), [Case.DUPLICATE, Case.RESET_AFTER_SEND])
    assert report.measured_grade is report.declared_grade is Grade.C
    with pytest.raises(AssertionError, match="a credential stands in an error"):
        report.require(Grade.C)


def test_an_abandoned_call_proves_nothing_about_its_outcome(world: World, proxy: FaultyProxy) -> None:
    tried = subject(these.IgnoresTheDeadline(proxy.url), world, proxy)
    for _ in range(3):
        words = run_case(tried, Case.TIMEOUT_AFTER_SEND).notes
        if len(words) == 1:  # on a busy machine its request may come too late to be met by the fault
            break
    assert ["past its deadline" in each for each in words] == [True]


def test_a_key_that_is_honoured_without_being_declared_is_mentioned(world: World, proxy: FaultyProxy) -> None:
    class Modest(these.Base):
        name = "modest"

        @these.at_once()
        def make(self, call: Call, *, what: str) -> dict[str, Any]:
            return self.keyed(call, what)

    def mentioned(timeout: timedelta) -> None:
        finding = check_case(subject(Modest(proxy.url), world, proxy, timeout=timeout), Case.DUPLICATE)
        assert finding.notes == ["the key was honoured, although the operation does not say so"]
        assert finding.is_key_honoured

    in_time(mentioned)


@pytest.mark.parametrize("case", [Case.TIMEOUT_BEFORE_SEND, Case.RESET_AFTER_SEND, Case.BUSY])
def test_a_connector_that_bypasses_the_proxy_is_reported(case: Case, world: World, proxy: FaultyProxy) -> None:
    around = these.HonestA(f"http://127.0.0.1:{world.server_port}")
    with pytest.raises(AssertionError, match="the connector must reach its server through the proxy"):
        check_case(subject(around, world, proxy), case)


def test_an_effect_that_the_counter_does_not_see_is_no_proof(world: World, proxy: FaultyProxy) -> None:
    def unseen(timeout: timedelta) -> None:
        blind = subject(these.HonestD(proxy.url), world, proxy, effects=lambda _: 0, timeout=timeout)
        assert "not staged: it happened 0 times instead of 1" in complaint(blind, Case.RESET_AFTER_SEND)

    in_time(unseen)


def test_an_index_that_lags_longer_than_the_settle_window_fails(world: World, proxy: FaultyProxy) -> None:
    world.hides.set()

    def hidden(timeout: timedelta) -> None:
        found = complaint(subject(these.HonestB(proxy.url), world, proxy, timeout=timeout), Case.RESET_AFTER_SEND)
        assert "NotFound although it is there and the settle window is over" in found

    in_time(hidden)


def test_an_index_that_lags_within_the_settle_window_passes(world: World, proxy: FaultyProxy) -> None:
    class Once(threading.Event):
        """The first search does not find it, and every later one does."""

        def is_set(self) -> bool:
            was_set = super().is_set()
            self.clear()
            return was_set

    world.hides = Once()

    def lagging(timeout: timedelta) -> None:
        world.hides.set()
        world.requests.clear()
        late = subject(these.HonestB(proxy.url), world, proxy, timeout=timeout, settle=timeout)
        assert check_case(late, Case.RESET_AFTER_SEND).status == "pass"
        assert ["GET" in request for request in world.requests] == [False, True, True]

    in_time(lagging)


def test_cases_that_do_not_apply_have_a_reason(world: World, proxy: FaultyProxy) -> None:
    plain = subject(these.HonestD(proxy.url), world, proxy, is_http=False)
    found = {case: check_case(plain, case) for case in (Case.BUSY, Case.ERROR_AFTER_COMMIT, Case.RECONCILE_AFTER)}
    assert {finding.status for finding in found.values()} == {"not applicable"}
    assert found[Case.BUSY].notes == ["only for HTTP"]
    assert found[Case.RECONCILE_AFTER].notes == ["the operation has no reconcile"]
    assert world.requests == []


def test_cases_of_keys_do_not_apply_without_a_key_or_a_way_to_try_them(world: World, proxy: FaultyProxy) -> None:
    keyless = subject(these.HonestD(proxy.url), world, proxy)
    cases = (Case.KEY_REPLAY, Case.KEY_OTHER_REQUEST, Case.KEY_KEPT_ERROR, Case.KEY_EXPIRED)
    assert {check_case(keyless, case).notes[0] for case in cases} == {"the operation is not keyed"}
    bare = {"other_params": None, "forget_keys": None}
    found = [
        check_case(subject(kind(proxy.url), world, proxy, **bare), case).notes
        for kind, case in (
            (these.HonestStrict, Case.KEY_OTHER_REQUEST),
            (these.HonestStrict, Case.KEY_EXPIRED),
            (these.HonestC, Case.KEY_EXPIRED),
        )
    ]
    assert found == [
        ["other_params says what another request is"],
        ["key_lifetime is 1 day, 0:00:00; forget_keys lets the server forget"],
        ["key_lifetime is not declared: keys are taken to be kept; forget_keys lets the server forget"],
    ]
    assert world.requests == []


def test_a_report_says_how_keys_are_handled(world: World, proxy: FaultyProxy) -> None:
    cases = [Case.KEY_REPLAY, Case.KEY_OTHER_REQUEST, Case.KEY_KEPT_ERROR, Case.KEY_EXPIRED]

    def told(timeout: timedelta) -> None:
        report = conformance(subject(these.HonestStrict(proxy.url), world, proxy, timeout=timeout), cases)
        assert [(finding.status, finding.notes) for finding in report.results] == [
            ("pass", []),
            ("pass", []),
            (
                "pass",
                [
                    "unknown: after many repeats an operator decides. If the server marks a kept error, "
                    "read it as refused"
                ],
            ),
            ("pass", ["key_lifetime is 1 day, 0:00:00"]),
        ]

    in_time(told)


def test_a_server_that_takes_another_request_for_the_first_is_mentioned(world: World, proxy: FaultyProxy) -> None:
    def told(timeout: timedelta) -> None:
        tried = subject(these.HonestC(proxy.url), world, proxy, timeout=timeout)
        other, expired = (check_case(tried, case) for case in (Case.KEY_OTHER_REQUEST, Case.KEY_EXPIRED))
        assert other.notes == ["the server answered the other request with the result of the first"]
        assert expired.notes[1:] == ["the server still honoured the key"]

    in_time(told)


def test_additional_secrets_are_searched_for_too(world: World, proxy: FaultyProxy) -> None:
    def kept(timeout: timedelta) -> None:
        secretive = subject(these.HonestD(proxy.url), world, proxy, secrets=["timed out"], timeout=timeout)
        assert "a credential stands in an error" in complaint(secretive, Case.TIMEOUT_AFTER_SEND)

    in_time(kept)


def test_parameters_can_be_made_from_the_key(world: World, proxy: FaultyProxy) -> None:
    made: list[str] = []

    def params(key: str) -> dict[str, str]:
        made.append(key)
        return {"what": key}

    def applied(timeout: timedelta) -> None:
        made.clear()
        world.happened.clear()
        check_case(subject(these.HonestA(proxy.url), world, proxy, params=params, timeout=timeout), Case.APPLIED)
        assert set(made) == set(world.happened)

    in_time(applied)


def test_an_operation_that_is_not_there_is_named_with_those_that_are(world: World, proxy: FaultyProxy) -> None:
    with pytest.raises(InvalidInputError, match="no mutation 'mkae' to try; known: make"):
        conformance(subject(these.HonestA(proxy.url), world, proxy, operation="mkae"))


def test_a_report_mentions_errors_that_could_be_definite(world: World, proxy: FaultyProxy) -> None:
    class Cautious(these.Base):
        name = "cautious"

        @these.at_once(errors=lambda _: ErrorReading(meaning=ErrorMeaning.UNKNOWN))
        def make(self, call: Call, *, what: str) -> dict[str, Any]:
            return self.plain(call, what)

    def told(timeout: timedelta) -> None:
        tried = subject(Cautious(proxy.url), world, proxy, timeout=timeout)
        (refused,), (busy,) = (check_case(tried, case).notes for case in (Case.REFUSED_CONNECTION, Case.BUSY))
        assert refused.startswith("expected 'not now': nothing can have happened")
        assert busy.startswith("expected 'not now', and after 0:00:07 as the server asked")

    in_time(told)
