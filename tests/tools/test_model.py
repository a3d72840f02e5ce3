"""The executable model of the protocol: every state within its bounds keeps the rules, and a missing guard is found."""

import pytest

from tools.model import PROVIDERS, Bug, Model, Provider, State, explore, forbidden_moves, steps

pytestmark = pytest.mark.timeout(600)  # seconds of pure computing: minutes on a busy machine

_BY_NAME = {provider.name: provider for provider in PROVIDERS}
#: A provider with which a missing guard does harm.
_HARMED_BY = {
    Bug.NO_FENCE: ("search only", "belongs to a run"),
    Bug.KEY_NOT_KEPT: ("keys and search", "at most one effect"),
    Bug.EARLY_ABSENCE: ("search only", "absent"),
    Bug.STALE_ABSENCE: ("search only", "absent"),
    Bug.ONE_CLOCK: ("search only", "absent"),
    Bug.EARLY_RELEASE: ("search only", "at most one"),
    Bug.SEND_AFTER_DEADLINE: ("search only", "absent"),
}


@pytest.mark.parametrize("provider", [_BY_NAME["search only"], _BY_NAME["keys only"]], ids=lambda each: each.name)
def test_every_state_keeps_the_rules_and_leads_to_an_end(provider: Provider) -> None:
    report = explore(Model(provider=provider, max_claims=3))
    assert (report.broken, report.trace, report.stuck, report.is_complete) == ("", [], 0, True)
    assert report.states > 10_000


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.value)
def test_a_missing_guard_is_found(bug: Bug) -> None:
    name, rule = _HARMED_BY[bug]
    report = explore(Model(provider=_BY_NAME[name], bug=bug, max_claims=3))
    assert rule in report.broken
    assert report.trace[0] == "start a run"


def test_a_trace_can_be_replayed() -> None:
    model = Model(provider=_BY_NAME["search only"], bug=Bug.ONE_CLOCK, max_claims=3)
    state = model.start
    for name in explore(model).trace:
        state = next(after for step, after in steps(model, state) if step == name)
    assert state.mutations[0].is_absence


def test_a_move_that_no_table_has_is_reported() -> None:
    model = Model(provider=PROVIDERS[0])
    (_, started), *_ = steps(model, model.start)
    assert not list(forbidden_moves(model.start, started))
    backwards = State(*started)._replace(runs=(started.runs[0]._replace(phase=list(type(started.runs[0].phase))[-1]),))
    assert list(forbidden_moves(backwards, started)) == ["phase committed to pending"]
