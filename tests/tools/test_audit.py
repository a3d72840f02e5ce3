"""The audit of dependencies fails on a vulnerability, and never passes silently."""

import json

from tools.audit import summary


def test_a_vulnerability_fails_and_is_named_with_its_fix() -> None:
    found = {"id": "PYSEC-1", "fix_versions": ["2.1"]}
    report = {"dependencies": [{"name": "left", "version": "2.0", "vulns": [found]}, {"name": "a", "skip_reason": "?"}]}
    assert summary(json.dumps(report)) == (
        ["left 2.0: PYSEC-1, fixed in 2.1", "1 of 2 packages were not audited: the database has no answer."],
        1,
    )


def test_an_audit_without_its_database_says_so() -> None:
    assert summary("")[0] == ["The audit of dependencies did not run: its database could not be reached."]
    lines, code = summary(json.dumps({"dependencies": [{"name": "a", "skip_reason": "not found"}]}))
    assert (lines, code) == (["1 of 1 packages were not audited: the database has no answer."], 0)


def test_a_clean_audit_counts_what_was_audited() -> None:
    report = {"dependencies": [{"name": "left", "version": "2.0", "vulns": []}]}
    assert summary(json.dumps(report)) == (["No known vulnerability in the 1 packages that were audited."], 0)
