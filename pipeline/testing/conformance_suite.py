"""Check that a connector reports its outcomes truly, by breaking its connections.

A ``Subject`` is one mutation of a connector that reaches its real server through a ``FaultyProxy``, with a count of the
effects that really happened. Each case calls the mutation, breaks something, and compares the report with the count:

- an error that reads "it did not happen" means that it did not happen and will not happen;
- a result means that it happened once;
- a reconcile finds the effect if and only if it is there;
- a repeat under an honoured key never says that the first request did not happen.
"""

import secrets
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal

from pipeline.connectors import event_loop
from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.operations import Grade
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Verdict
from pipeline.testing.fault_proxy import Fault, FaultyProxy


class Case(StrEnum):
    """One situation that the connector must report truly."""

    APPLIED = "applied"
    REFUSED_CONNECTION = "refused-connection"
    TIMEOUT_BEFORE_SEND = "timeout-before-send"
    RESET_BEFORE_SEND = "reset-before-send"
    RESET_AFTER_SEND = "reset-after-send"
    TIMEOUT_AFTER_SEND = "timeout-after-send"
    DRIPPING_ANSWER = "dripping-answer"
    ERROR_AFTER_COMMIT = "error-after-commit"  #: HTTP: a 5xx although it happened
    SLOW_COMMIT = "slow-commit"  #: the effect happens after the deadline, within the settle window
    DUPLICATE = "duplicate"  #: the same call twice
    BUSY = "busy"  #: HTTP: 429 with Retry-After
    TOO_LATE = "too-late"  #: called when its deadline has passed
    RECONCILE_BEFORE = "reconcile-before"  #: nothing was ever sent
    RECONCILE_AFTER = "reconcile-after"  #: it happened
    RECONCILE_CUT_OFF = "reconcile-cut-off"  #: it happened, and the server does not answer the reconcile
    KEY_REPLAY = "key-replay"  #: keyed: the answer is lost, and the same call is made again
    KEY_OTHER_REQUEST = "key-other-request"  #: keyed: another request under the key of one that happened
    KEY_KEPT_ERROR = "key-kept-error"  #: keyed, HTTP: the server keeps its own 500 under the key
    KEY_EXPIRED = "key-expired"  #: keyed: the same call after the server has forgotten the key


CASES = tuple(Case)  #: every case, in the order in which they are tried
CaseStatus = Literal["pass", "fail", "not applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One operation of a connector whose connections go through the proxy.

    ``effects`` counts what really happened, by idempotency key, without the connector. ``params`` may be a function of
    the key. ``timeout`` and ``settle`` replace those of the operation, so that tests are fast.
    """

    connector: Connector
    operation: str
    params: Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
    effects: Callable[[str], int]
    proxy: FaultyProxy
    is_http: bool = True
    timeout: timedelta = timedelta(seconds=1)
    settle: timedelta | None = None  #: by default that of the operation
    slack: float = 0.5  #: the share of the timeout by which a call may overrun it
    result_parts: Collection[str] = ()  #: parts of a result that a reconcile must return too: ``id``, ``body.id``
    other_params: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None  #: of another request
    forget_keys: Callable[[], None] | None = None  #: lets the server forget its keys, as after ``key_lifetime``
    secrets: Collection[str] = ()  #: texts that no error may contain, besides the connector's ``SecretStr`` attributes

    @property
    def declared_operation(self) -> Operation[Any]:
        """The operation as the connector declares it."""
        known = {name: each for name, each in type(self.connector).operations().items() if each.is_mutation}
        if self.operation not in known:
            raise InvalidInputError(f"There is no mutation {self.operation!r} to try; known: {', '.join(known)}.")
        return known[self.operation]


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """The result of one case, with notes."""

    case: Case
    status: CaseStatus = "pass"
    notes: list[str] = field(default_factory=list)
    is_key_honoured: bool = False  #: two calls with one key had one effect
    has_found_effect: bool = False  #: a reconcile found the effect
    has_lied: bool = False  #: a reconcile returned a wrong verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """The results of the cases for one operation, and its measured grade."""

    name: str
    declared_grade: Grade
    results: tuple[CaseResult, ...]

    @property
    def measured_grade(self) -> Grade:
        """Return the grade that the cases have shown."""
        keyed = any(finding.is_key_honoured for finding in self.results)
        if any(finding.has_found_effect for finding in self.results) and not any(
            finding.has_lied for finding in self.results
        ):
            return Grade.A if keyed else Grade.B
        return Grade.C if keyed else Grade.D

    def require(self, grade: Grade | None = None) -> None:
        """Raise ``AssertionError`` with the table unless every case passes and the grade is at least this one."""
        wanted = min(grade or self.declared_grade, self.declared_grade)  # A is the best, and the first of the alphabet
        if self.measured_grade > wanted or any(finding.status == "fail" for finding in self.results):
            raise AssertionError(f"expected grade {wanted} and no failure\n{self}")

    def __str__(self) -> str:
        lines = [f"{self.name}: declared {self.declared_grade}, measured {self.measured_grade}"]
        for finding in self.results:
            first, *more = finding.notes or [""]
            lines.append(f"  {finding.case:<20} {finding.status:<15} {first}".rstrip())
            lines += [f"{'':<39}{note}" for note in more]
        return "\n".join(lines)


def conformance(subject: Subject, cases: Collection[Case] = CASES) -> ConformanceReport:
    """Run the cases, one after the other, and measure the grade."""
    findings = tuple(run_case(subject, case) for case in cases)
    name = f"{subject.connector.name}.{subject.operation}"
    return ConformanceReport(name=name, declared_grade=subject.declared_operation.grade, results=findings)


def check_case(subject: Subject, case: Case) -> CaseResult:
    """Run one case, for a test per case. Raise ``AssertionError`` with the notes if it fails."""
    finding = run_case(subject, case)
    if finding.status == "fail":
        raise AssertionError(f"{subject.connector.name}.{subject.operation}, {case}: {'; '.join(finding.notes)}")
    return finding


def run_case(subject: Subject, case: Case) -> CaseResult:
    """Run one case and return its result."""
    if reason := _inapplicable_reason(subject, case):
        return CaseResult(case=case, status="not applicable", notes=[reason])
    subject.proxy.restore()
    trial = _CaseRun(subject, case)
    try:
        _CASE_FUNCTIONS[case](trial)
    finally:
        subject.proxy.restore()
    return trial.result


def _inapplicable_reason(subject: Subject, case: Case) -> str:
    """Say why a case does not apply; empty if it does."""
    operation = subject.declared_operation
    if case in _HTTP_ONLY and not subject.is_http:
        return "only for HTTP"
    if case in _RECONCILE_CASES and not operation.can_reconcile:
        return "the operation has no reconcile"
    if case in _KEY_CASES and not operation.keyed:
        return "the operation is not keyed"
    if case is Case.KEY_OTHER_REQUEST and subject.other_params is None:
        return "other_params says what another request is"
    if case is Case.KEY_EXPIRED and subject.forget_keys is None:
        return f"{_lifetime_text(operation)}; forget_keys lets the server forget"
    return ""


def _lifetime_text(operation: Operation[Any]) -> str:
    if operation.key_lifetime is None:
        return "key_lifetime is not declared: keys are taken to be kept"
    return f"key_lifetime is {operation.key_lifetime}"


@dataclass(slots=True)
class _CallEnd:
    """How a call ended. Without a time it did not end, and was abandoned."""

    value: Any = None
    error: BaseException | None = None
    at: float | None = None


class _CaseRun:
    """A case that is running, with its result so far."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.proxy, self.operation = subject, subject.proxy, subject.declared_operation
        self.result, self.params = CaseResult(case=case), subject.params
        self.settle = self.operation.settle if subject.settle is None else subject.settle
        self.quiet_until = 0.0  #: before it, absence is no evidence
        self.renew_key()

    def renew_key(self) -> None:
        """Continue with a new idempotency key."""
        self.key = f"conformance:{self.result.case}:{secrets.token_hex(6)}"

    @property
    def effect_count(self) -> int:
        """Return how often the effect really happened."""
        return self.subject.effects(self.key)

    def fail(self, note: str, *, has_lied: bool = False) -> None:
        """Record a failure, with credentials removed."""
        self.result.status, self.result.has_lied = "fail", self.result.has_lied or has_lied
        self.note(self.subject.connector.scrub(note))

    def note(self, text: str) -> None:
        """Record a note, once."""
        self.result.notes += [text] if text not in self.result.notes else []

    def send(self, ends_at: float | None = None) -> _CallEnd:
        """Call the mutation once, check what holds for every call, then let late requests pass."""
        call = Call(idempotency_key=self.key, ends_at=ends_at or Call.within("", self.subject.timeout).ends_at)
        before = len(self.proxy.requests)
        ended, margin = self._call_bounded(self.operation.function, call, "the call")
        if self.proxy.pending_faults:
            self.fail("no request met the fault: the connector must reach its server through the proxy")
        self.proxy.restore()
        sent = [seen.at for seen in self.proxy.requests[before:] if seen.has_effect]
        if len(sent) > 1:
            self.fail(f"one call sent {len(sent)} requests: it must not retry inside, the runtime does that")
        if any(at > call.ends_at + (0 if ends_at else margin) for at in sent):
            self.fail("the call sent something after its deadline")
        self.quiet_until = max(call.ends_at, ended.at or time.monotonic()) + self.settle.total_seconds()
        return ended

    def reconcile(self) -> Verdict | None:
        """Reconcile. None if the operation has no reconcile or the reconcile failed: that is no verdict."""
        if self.operation.reconcile_function is None:
            return None
        is_there, counts = self.effect_count > 0, time.monotonic() >= self.quiet_until
        ended, _ = self._call_bounded(
            self.operation.reconcile_function, Call.within(self.key, self.subject.timeout), "reconcile"
        )
        if ended.at is None or ended.error is not None:
            return None
        self.check_secrets(repr(ended.value), "a verdict")
        match ended.value:
            case Applied() if not self.effect_count:
                self.fail("reconcile says Applied, and it is not there", has_lied=True)
            case NotFound() if is_there and counts:
                self.fail("reconcile says NotFound although it is there and the settle window is over", has_lied=True)
            case other if not isinstance(other, Verdict):
                self.fail(f"reconcile returned {other!r}; expected Applied, NotFound or Retry", has_lied=True)
        return ended.value if isinstance(ended.value, Verdict) else None

    def check_outcome(self, ended: _CallEnd, expected: int) -> ErrorReading | None:
        """Compare the report of a call with the effects, at once and after the settle window."""
        reading = self.reading(ended)
        says_no = reading is not None and reading.meaning is not ErrorMeaning.UNKNOWN
        first, verdict = self.effect_count, self.reconcile()
        if says_no or not self.effect_count or (self.operation.can_reconcile and not isinstance(verdict, Applied)):
            self.wait_until_settled()
            self.reconcile()
        count = max(first, self.effect_count)
        if reading is None and count != 1:
            self.fail(f"it returned a result, which says that it happened once; it happened {count} times")
        elif reading is not None and says_no and count:
            self.fail(f"its error reads {reading.meaning.value!r}, which says that it did not happen; it did")
        elif count > 1:
            self.fail(f"one call happened {count} times")
        elif count != expected and self.result.status == "pass":
            advice = "the proxy's `has_effect` must pick the request that has the effect, and `effects` must count it"
            self.fail(f"not staged: it happened {count} times instead of {expected}; {advice}")
        return reading

    def reading(self, ended: _CallEnd) -> ErrorReading | None:
        """Read the end of a call. None means that it happened."""
        if ended.at is None:
            return ErrorReading(meaning=ErrorMeaning.UNKNOWN)
        return None if ended.error is None else self.operation.reading(ended.error)

    def check_repeat(self, ended: _CallEnd, what: str) -> ErrorReading | None:
        """Check what a second call under the key of one that happened says: never that it did not happen."""
        reading = self.reading(ended)
        self.wait_until_settled()
        if not self.effect_count:
            self.fail("not staged: the first call happened 0 times instead of 1")
        elif reading is not None and reading.meaning is not ErrorMeaning.UNKNOWN:
            self.fail(
                f"the second call reads {reading.meaning.value!r}: it did not happen; but the first one did ({what})"
            )
        return reading

    def wait_until_settled(self) -> None:
        """Wait until the settle window is over and late requests have arrived."""
        threading.Event().wait(max(0.0, self.quiet_until - time.monotonic()))
        while any(seen.fault is Fault.COMMITS_LATE and not seen.is_over for seen in self.proxy.requests):
            threading.Event().wait(0.01)

    def check_secrets(self, text: str, where: str) -> None:
        """Fail the case if a text that people will read contains a credential."""
        if self.subject.connector.scrub(text) != text or any(word in text for word in self.subject.secrets):
            self.fail(f"a credential stands in {where}, where it would be written down and shown")

    def _call_bounded(self, function: Callable[..., Any], call: Call, what: str) -> tuple[_CallEnd, float]:
        """Run a call with a deadline, as a worker does. Return its end and the possible error of its time."""
        made = self.params
        given = self.operation.arguments(self.operation.to_stored_params(made(self.key) if callable(made) else made))
        ended = _CallEnd()

        def run() -> None:
            try:
                ended.value = event_loop.await_result(function(self.subject.connector, call, **given))
            except BaseException as error:  # noqa: BLE001 - the case reads whatever the connector raises
                ended.error = error
            ended.at = time.monotonic()

        allowed = (self.subject.timeout * self.subject.slack).total_seconds()
        hiccup = _run_with_deadline(run, until=max(call.ends_at, time.monotonic()) + 2 * allowed + 0.5)
        over = (ended.at or time.monotonic()) - call.ends_at
        if ended.at is None or over > allowed + hiccup:
            self.fail(f"{what} ran {over:.2f} s past its deadline; at most {allowed:g} s are allowed")
        if ended.error is not None:
            self.check_secrets("".join(traceback.format_exception(ended.error)) + repr(ended.error), "an error")
        return ended, hiccup + allowed / 5


def _run_with_deadline(run: Callable[[], None], until: float) -> float:
    """Run in a thread, until a time. Return by how much threads woke late, because the machine may be busy."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    worst, at = 0.0, time.monotonic()
    while thread.is_alive() and at < until:
        thread.join(0.01)
        worst, at = max(worst, time.monotonic() - at - 0.01), time.monotonic()
    return worst


def _applied(trial: _CaseRun) -> None:
    ended = trial.send()
    if ended.error is not None:
        trial.fail(f"nothing was in its way, and it raised {ended.error!r}")
    trial.check_outcome(ended, expected=1)
    trial.check_secrets(repr(trial.subject.connector), "the connector's repr")


def _with_fault(trial: _CaseRun) -> None:
    fault, expected = _FAULT_CASES[trial.result.case]
    delay = trial.settle / 2 if fault is Fault.COMMITS_LATE else trial.subject.timeout / 5
    for status in (500, 502, 504) if fault is Fault.FAILS_AFTER else (0,):  # a 503 may mean that it did not happen
        trial.renew_key()
        trial.proxy.will(fault, delay=delay, status=status)
        reading = trial.check_outcome(trial.send(), expected)
    if fault is Fault.BUSY and reading != ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=trial.proxy.retry_after):
        trial.note(f"expected 'not now', and after {trial.proxy.retry_after} as the server asked; it reads {reading}")


def _refused_connection(trial: _CaseRun) -> None:
    trial.proxy.refuse_connections()
    reading = trial.check_outcome(trial.send(), expected=0)
    if reading is None or reading.meaning is not ErrorMeaning.NOT_NOW:
        trial.note("expected 'not now': nothing can have happened; errors= may say so if no redirect is followed")


def _duplicate(trial: _CaseRun) -> None:
    first, second = trial.reading(trial.send()), trial.reading(trial.send())
    trial.wait_until_settled()
    trial.result.is_key_honoured = first is None and trial.effect_count == 1
    if trial.operation.keyed and not trial.result.is_key_honoured:
        trial.fail(f"it says that the key is honoured; the same call twice happened {trial.effect_count} times")
    if trial.result.is_key_honoured and second is not None and second.meaning is not ErrorMeaning.UNKNOWN:
        trial.fail(f"the second call reads {second.meaning.value!r}: it did not happen; but the first one did")
    if trial.result.is_key_honoured and not trial.operation.keyed:
        trial.note("the key was honoured, although the operation does not say so")


def _key_replay(trial: _CaseRun) -> None:
    trial.proxy.will(Fault.RESETS_AFTER)
    trial.send()
    ended = trial.send()
    reading = trial.check_repeat(ended, "a replayed result means applied")
    if trial.effect_count > 1:
        trial.fail(f"the same call again after a lost answer happened {trial.effect_count} times")
    elif reading is not None:
        trial.note("the repeat leaves the outcome unknown: it could return the replayed result")
    else:
        _compare_parts(trial, ended.value, trial.reconcile())


def _key_other_request(trial: _CaseRun) -> None:
    assert trial.subject.other_params is not None
    trial.send()
    trial.params = trial.subject.other_params
    reading = trial.check_repeat(trial.send(), "a key that is taken means unknown")
    if trial.effect_count > 1:
        trial.note("the server did the other request too: its keys count per request")
    elif reading is None:
        trial.note("the server answered the other request with the result of the first")


def _key_kept_error(trial: _CaseRun) -> None:
    for _ in range(2):
        trial.proxy.will(Fault.FAILS_BEFORE, status=500)
        reading = trial.check_outcome(trial.send(), expected=0)
    if reading is None or reading.meaning is ErrorMeaning.REFUSED:
        return
    if reading.meaning is ErrorMeaning.UNKNOWN:
        trial.note(
            "unknown: after many repeats an operator decides. If the server marks a kept error, read it as refused"
        )
    else:
        again = "a repeat has the same key and meets the kept error again"
        trial.fail(f"the second call reads {reading.meaning.value!r}: {again}; expected unknown, or refused")


def _key_expired(trial: _CaseRun) -> None:
    assert trial.subject.forget_keys is not None
    trial.send()
    trial.subject.forget_keys()
    trial.send()
    trial.wait_until_settled()
    trial.note(_lifetime_text(trial.operation))
    if trial.effect_count > 1 and trial.operation.key_lifetime is None:
        trial.fail("the server forgets keys: declare key_lifetime, or operators expect that a late repeat is harmless")
    elif trial.effect_count == 1:
        trial.note("the server still honoured the key")


def _too_late(trial: _CaseRun) -> None:
    trial.check_outcome(trial.send(ends_at=time.monotonic() - 0.001), expected=0)


def _reconcile_before(trial: _CaseRun) -> None:
    verdict = trial.reconcile()
    if trial.effect_count:
        trial.fail("it happened during the reconcile: a reconcile must not send anything", has_lied=True)
    if not isinstance(verdict, NotFound):
        trial.note("it never returns NotFound: an operator must resolve a mutation that did not happen")


def _reconcile_after(trial: _CaseRun) -> None:
    ended = trial.send()
    trial.wait_until_settled()
    verdict = trial.reconcile()
    if not isinstance(verdict, Applied):
        trial.fail(f"it happened, and reconcile does not find it: {verdict!r}")
        return
    trial.result.has_found_effect = True
    _compare_parts(trial, ended.value, verdict)


def _reconcile_cut_off(trial: _CaseRun) -> None:
    trial.send()
    trial.wait_until_settled()
    trial.proxy.refuse_connections()
    trial.reconcile()
    for fault in (Fault.TIMES_OUT_BEFORE, Fault.UNAVAILABLE if trial.subject.is_http else Fault.RESETS_BEFORE):
        trial.proxy.restore()
        trial.proxy.will(fault, any_request=True)
        trial.reconcile()


def _compare_parts(trial: _CaseRun, value: Any, verdict: Verdict | None) -> None:
    """Compare the result of a call with what a reconcile found, if it found something."""
    if not isinstance(verdict, Applied):
        return
    for part in trial.subject.result_parts:
        sent, found = _part(value, part), _part(verdict.result, part)
        if sent != found:
            trial.fail(f"the result of the call has {part}={sent!r}, that of reconcile has {found!r}")


def _part(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


_HTTP_ONLY = frozenset({Case.ERROR_AFTER_COMMIT, Case.BUSY, Case.KEY_KEPT_ERROR})
_KEY_CASES = frozenset({Case.KEY_REPLAY, Case.KEY_OTHER_REQUEST, Case.KEY_KEPT_ERROR, Case.KEY_EXPIRED})
_RECONCILE_CASES = frozenset({Case.RECONCILE_BEFORE, Case.RECONCILE_AFTER, Case.RECONCILE_CUT_OFF})
_FAULT_CASES: Mapping[Case, tuple[Fault, int]] = {  # with the number of effects
    Case.TIMEOUT_BEFORE_SEND: (Fault.TIMES_OUT_BEFORE, 0),
    Case.RESET_BEFORE_SEND: (Fault.RESETS_BEFORE, 0),
    Case.RESET_AFTER_SEND: (Fault.RESETS_AFTER, 1),
    Case.TIMEOUT_AFTER_SEND: (Fault.TIMES_OUT_AFTER, 1),
    Case.DRIPPING_ANSWER: (Fault.DRIPS, 1),
    Case.ERROR_AFTER_COMMIT: (Fault.FAILS_AFTER, 1),
    Case.SLOW_COMMIT: (Fault.COMMITS_LATE, 1),
    Case.BUSY: (Fault.BUSY, 0),
}
_CASE_FUNCTIONS: Mapping[Case, Callable[[_CaseRun], None]] = {
    **dict.fromkeys(_FAULT_CASES, _with_fault),
    Case.APPLIED: _applied,
    Case.REFUSED_CONNECTION: _refused_connection,
    Case.DUPLICATE: _duplicate,
    Case.KEY_REPLAY: _key_replay,
    Case.KEY_OTHER_REQUEST: _key_other_request,
    Case.KEY_KEPT_ERROR: _key_kept_error,
    Case.KEY_EXPIRED: _key_expired,
    Case.TOO_LATE: _too_late,
    Case.RECONCILE_BEFORE: _reconcile_before,
    Case.RECONCILE_AFTER: _reconcile_after,
    Case.RECONCILE_CUT_OFF: _reconcile_cut_off,
}
