"""Trying the cases of the kit on a machine that may stand still: what too little time explains is tried with more.

The calls of most cases are waited out, so their time is short. A call that honest work could not end in it
looks like one of a connector that does not work; given several times as long, only the latter still does.
What is a lie is one in any time, and counts at once.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from pipeline.testing.conformance import CASES, Case, Finding, Report, Subject, conformance, examined

#: What the kit says of a call that had too little time. A note that comes with it is no lie either.
_HASTE = re.compile(
    "nothing was in its way"
    "|no request met the fault"
    "|past its deadline"
    "|sent something after its deadline"
    "|not staged"
    "|reconcile does not find it: None"
    "|the same call twice happened [01] times"
    "|^expected 'not now'"
)
#: This too is said of a look that did not end, and of one that ended without an answer.
_SHY = "it never says NotFound: what did not happen stays a question for a person"
MORE = 8


def patient(subject: Subject, cases: Collection[Case] = CASES) -> Report:
    """What the kit finds, with more time for the cases that may have had too little."""
    report = conformance(subject, cases)
    return replace(report, findings=tuple(_again(subject, finding) for finding in report.findings))


def patiently(subject: Subject, case: Case) -> Finding:
    """What the kit finds of one case, with more time if it may have had too little."""
    return _again(subject, examined(subject, case))


def _again(subject: Subject, finding: Finding) -> Finding:
    is_hasty = finding.standing == "fail" and all(map(_HASTE.search, finding.words))
    if is_hasty or _SHY in finding.words:
        return examined(replace(subject, timeout=MORE * subject.timeout), finding.case)
    return finding
