"""Trying the cases of the kit on a machine that may stand still: what too little time explains is tried with more.

The calls of most cases are waited out, so their time is short. A call that honest work could not end in it
looks like one of a connector that does not work; given several times as long, only the latter still does.
What is a lie is one in any time, and counts at once.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from pipeline.testing import CASES, Case, CaseResult, ConformanceReport, Subject, conformance
from pipeline.testing.conformance_suite import run_case

#: What the kit says of a call that had too little time. A note that comes with it is no lie either.
_HASTE = re.compile(
    "nothing was in its way"
    "|no request met the fault"
    "|one call sent 2 requests"  # the second is what an earlier case left behind
    "|past its deadline"
    "|sent something after its deadline"
    "|not staged"
    "|reconcile does not find it: None"
    "|reconcile does not find it: Retry.*copies are filed after sending"  # there was no time to file the copy
    "|reconcile does not find it: Retry.*the time for this call is over"
    "|the same call twice happened [01] times"
    "|the second call reads 'not now'"
    r"|the result of the call has \S+=None"
    "|^expected 'not now'"
)
#: This too is said of a look that did not end, and of one that ended without an answer.
_SHY = "it never returns NotFound: an operator must resolve a mutation that did not happen"
#: And this of a second call that did not get as far as its server.
_MODEST = "the key was honoured, although the operation does not say so"
#: And this when what makes a thing visible, which may take as long as the window of the subject, stood still.
_LAG = "reconcile says NotFound although it is there and the settle window is over"
MORE = 8


def patient(subject: Subject, cases: Collection[Case] = CASES) -> ConformanceReport:
    """What the kit finds, with more time for the cases that may have had too little."""
    report = conformance(subject, cases)
    return replace(report, results=tuple(_again(subject, finding) for finding in report.results))


def patiently(subject: Subject, case: Case) -> CaseResult:
    """What the kit finds of one case, with more time if it may have had too little."""
    return _again(subject, run_case(subject, case))


def _again(subject: Subject, finding: CaseResult) -> CaseResult:
    settle = None if subject.settle is None else MORE * subject.settle
    notes = [note for note in finding.notes if settle is None or note != _LAG]
    is_hasty = finding.status == "fail" and all(map(_HASTE.search, notes))
    if is_hasty or {_SHY, _MODEST} & {*finding.notes}:
        return run_case(replace(subject, timeout=MORE * subject.timeout, settle=settle), finding.case)
    return finding
