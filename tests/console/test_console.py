"""The console in a real browser, with a real worker behind it."""

import csv
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery
from playwright.sync_api import Page, expect

from pipeline.client import BrokerClient
from pipeline.domain.values import Actor
from pipeline.transitions import late_effects
from tests.console.conftest import AXE, OpenPage
from tests.support.console_shop import ConsoleShop
from tests.support.console_workflow import CARD
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(240)

_VIOLATIONS = """async (rules) => (await axe.run(document, {resultTypes: ['violations'], ...rules})).violations
    .map(each => each.id + ': ' + each.nodes.map(node => node.target.join(' ')).join(', '))"""
#: Every page that shows something, besides those of one item.
PAGES = (
    *("/", "/w", "/w/shop", "/ledger", "/runs", "/events", "/quarantine", "/dead-letters", "/connectors", "/system"),
    *("/audit", "/account", "/import", "/bulk", "/search?q=nothing"),
)


def give_answer(page: Page, answer: str, **fields: str) -> None:
    """Choose an answer, fill in what it asks for, and send it."""
    page.locator(f"input[name=answer][value={answer}]").check()
    page.locator("#reason").fill("seen in the provider's list")
    for name, value in fields.items():
        page.locator(f"[name='{name}']").fill(value)
    page.locator("[data-submit]").click()


def message(page: Page) -> Any:
    return expect(page.locator(".message"))


def test_an_unknown_outcome_appears_without_reload_and_is_resolved_by_its_result(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    shop.question("live-before")
    page = open_page("/?q=order+live-")  # questions of other tests would stand in the same incident
    page.evaluate("window.isTheSamePage = true")
    first = page.locator(".headline").first.text_content()
    shop.question("live-1", amount="41.10")
    expect(page.locator("#new-bar button")).to_have_text("1 new, show", timeout=30_000)
    assert page.locator(".headline").first.text_content() == first, "a row moved before it was asked to"
    assert page.title().startswith("("), "the title does not carry the count"
    page.keyboard.press("n")
    page.locator(".headline", has_text="order live-1").click()
    expect(page.locator("#question-title")).to_contain_text("Charge 41.10 EUR for order live-1: did it happen?")
    assert page.evaluate("window.isTheSamePage"), "the page was loaded again"
    page.locator("input[name=answer][value=happened]").check()
    page.locator("#external_id").fill("ch_live")
    page.get_by_role("button", name="Fetch").click()
    expect(page.locator("#fetched")).to_contain_text("Found.")
    assert shop.mutation("live-1").status == "indeterminate", "fetching recorded something"
    give_answer(page, "happened")
    message(page).to_contain_text("Recorded: it happened.")
    assert shop.wait_for_status("live-1", "applied").result["id"] == "ch_live"
    assert shop.sent("live-1") == 1


def test_a_result_is_given_field_by_field_and_checked(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page(shop.question("hand-1"))
    page.locator("input[name=answer][value=happened]").check()
    page.get_by_text("Or give the result by hand").click()
    give_answer(page, "happened", **{"result.id": "ch_hand"})
    message(page).to_contain_text("'Amount' of the result is empty")
    expect(page.locator("[name='result.id']")).to_have_value("ch_hand")
    page.get_by_label("captured").select_option("true")
    give_answer(page, "happened", **{"result.amount": "99.01"})
    message(page).to_contain_text("Recorded: it happened.")
    assert shop.mutation("hand-1").result == {"id": "ch_hand", "amount": "99.01", "captured": True}


def test_did_not_happen_asks_for_the_order_and_sends_again(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page(shop.question("again-1"))
    shop.tell("again-1", "answers")
    page.locator("input[name=answer][value=did_not_happen]").check()
    page.locator("#reason").fill("not in the provider's list")
    expect(page.locator("[data-submit]")).to_be_disabled()
    give_answer(page, "did_not_happen", confirm="again-1")
    message(page).to_contain_text("Recorded: it did not happen.")
    shop.wait_for_status("again-1", "applied")
    assert shop.sent("again-1") == 2


def test_a_skipped_one_is_not_sent_and_one_that_is_asked_again_is_found(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page(shop.question("skip-1"))
    give_answer(page, "skip")
    message(page).to_contain_text("Recorded: skipped.")
    assert (shop.mutation("skip-1").status, shop.sent("skip-1")) == ("failed", 1)
    page = open_page(shop.question("ask-1"))
    shop.tell("ask-1", "found")
    give_answer(page, "try_again")
    message(page).to_contain_text("The connector asks again.")
    found = shop.wait_for_status("ask-1", "applied")
    assert (found.resolved_by, shop.sent("ask-1")) == ("reconcile", 1)


def test_did_not_happen_is_disabled_while_the_request_may_still_arrive(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.publish("months.closed", "2026-10", seller="muller", amount="3120.40")
    page = open_page(f"/m/{shop.wait_for_status('2026-10', 'indeterminate').id}")
    expect(page.locator("input[value=did_not_happen]")).to_be_disabled()
    expect(page.locator("[data-while-disabled]")).to_contain_text("59 m")
    expect(page.locator("input[value=try_again]")).to_be_disabled()


def test_a_request_is_approved_and_another_rejected(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.publish("orders.returned", "yes-1", "no-1", amount="12.00")
    page = open_page(f"/m/{shop.wait_for_status('yes-1', 'pending').id}")
    page.get_by_role("button", name="Approve and send").click()
    message(page).to_contain_text("Approved.")
    shop.wait_for_status("yes-1", "applied")
    page.goto(f"{shop.url}/m/{shop.wait_for_status('no-1', 'pending').id}")
    page.get_by_role("button", name="Reject").click()
    message(page).to_contain_text("needs a reason")
    page.locator("#reason").fill("the customer kept it")
    page.get_by_role("button", name="Reject").click()
    message(page).to_contain_text("Rejected.")
    assert (shop.mutation("no-1").status, shop.sent("no-1")) == ("failed", 0)


def test_a_high_value_needs_the_same_answer_of_two_people(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.publish("orders.returned", "dear-1", amount="9000.00")
    path = f"/m/{shop.wait_for_status('dear-1', 'pending').id}"
    page, other = open_page(path), open_page(path, person="bob")
    expect(other.locator("#watchers")).to_contain_text("ada has this open")
    page.get_by_role("button", name="Approve and send").click()
    message(page).to_contain_text("Proposed.")
    assert shop.sent("dear-1") == 0
    other.reload()
    expect(other.locator("main")).to_contain_text("ada proposed")
    other.get_by_role("button", name="Approve and send").click()
    message(other).to_contain_text("Approved.")
    shop.wait_for_status("dear-1", "applied")
    assert shop.sent("dear-1") == 1


def test_selected_ones_are_previewed_and_then_resolved(open_page: OpenPage, shop: ConsoleShop) -> None:
    paths = [shop.question(order) for order in ("bulk-1", "bulk-2")]
    page = open_page("/ledger?status=indeterminate")
    for path, query in zip(paths, ("status=indeterminate", "error=TimeoutError"), strict=True):
        page.goto(f"{shop.url}/ledger?{query}")  # what was selected on one page stays selected on the next
        page.locator(f"input[data-select][value='{path.removeprefix('/m/')}']").check()
    page.goto(f"{shop.url}/ledger?status=pending")
    expect(page.locator("[data-bulk-count]")).to_have_text("2 selected")
    page.locator("#bulk-act").select_option("skip")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("h1")).to_contain_text("2 items: skip")
    assert shop.mutation("bulk-1").status == "indeterminate", "a preview changed something"
    page.locator("#reason").fill("the provider lost them")
    page.get_by_role("button", name="Do it for 2").click()
    expect(page.locator("h1")).to_contain_text("2 of 2 done")
    assert {shop.mutation(order).status for order in ("bulk-1", "bulk-2")} == {"failed"}


def test_an_export_resolves_what_it_matches_after_a_preview(
    open_page: OpenPage, shop: ConsoleShop, tmp_path: Path
) -> None:
    shop.question("export-1", amount="7.00")
    export = tmp_path / "charges.csv"
    with export.open("w", newline="") as file:
        result = '{"id": "ch_e", "amount": "7.00", "captured": true}'
        csv.writer(file).writerows(
            [("key", "charge"), (shop.mutation("export-1").idempotency_key, result), ("another", result)]
        )
    page = open_page("/import")
    page.set_input_files("#export", export)
    page.locator("#column").fill("key")
    page.locator("#result_kind").select_option("column")
    page.locator("#result_column").fill("charge")
    page.get_by_role("button", name="Preview").click()
    expect(page.locator("h1")).to_contain_text("1 item")
    expect(page.locator("dt", has_text="unmatched rows")).to_be_visible()
    page.locator("#reason").fill("by the provider's export")
    page.get_by_role("button", name="Do it for 1").click()
    expect(page.locator("h1")).to_contain_text("1 of 1 done")
    assert shop.wait_for_status("export-1", "applied").result["id"] == "ch_e"


def test_an_open_breaker_holds_a_charge_until_it_is_closed_from_the_inbox(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    page = open_page("/connectors")
    row = page.locator("tr", has_text="pay.charge")
    row.get_by_label("Why").fill("the provider is down")
    row.get_by_role("button", name="Open").click()
    message(page).to_contain_text("The breaker is open.")
    expect(row).to_contain_text("the provider is down")
    shop.tell("breaker-1", "answers")
    shop.order("breaker-1")
    prepared = """SELECT FROM pipeline.runs r JOIN pipeline.events e ON e.id = ANY(r.event_ids)
      WHERE e.message_id = 'breaker-1' AND r.status <> 'committed'"""
    wait_for(lambda: shop.installation.ask(prepared), within=60, why="a run took the order")
    page.goto(f"{shop.url}/?kind=breaker")
    page.locator(".headline", has_text="pay.charge starts no new mutation").click()
    expect(page).to_have_url(re.compile("/i/"))  # it opens beside the list
    page.locator("#pane").get_by_label("Why").fill("it answers again")
    assert shop.sent("breaker-1") == 0
    page.get_by_role("button", name="Close the breaker").click()
    message(page).to_contain_text("The breaker is closed.")
    shop.wait_for_status("breaker-1", "applied")
    assert shop.acts("breaker.open pay.charge", "breaker.close pay.charge") == [
        ("ada", "the provider is down"),
        ("ada", "it answers again"),
    ]


def test_a_workflow_is_paused_resumed_and_taken_out_of_maintenance_where_it_waits(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    page = open_page("/w/newsletter")
    for key, title, said in (
        ("pause", "Pause", "The workflow is paused."),
        ("resume", "Resume", "The workflow continues."),
        ("enter-maintenance", "Enter maintenance", "The workflow is in maintenance."),
    ):
        page.locator(f"#reason-{key}").fill(f"to {key}")
        page.get_by_role("button", name=title, exact=True).click()
        message(page).to_contain_text(said)
        if key == "pause":
            expect(page.locator("main")).to_contain_text("Paused by ada: to pause")
    page.goto(f"{shop.url}/?kind=maintenance")
    page.locator(".headline", has_text="newsletter is in maintenance").click()
    expect(page).to_have_url(re.compile("/i/"))  # it opens beside the list
    page.locator("#pane").get_by_label("Why").fill("to end it")
    page.get_by_role("button", name="End maintenance").click()
    message(page).to_contain_text("The workflow left maintenance.")
    (row,) = shop.installation.ask("SELECT desired, maintenance FROM pipeline.workflows WHERE name = 'newsletter'")
    assert (row.desired, row.maintenance) == ("active", False)
    assert {name for name, _ in shop.acts("workflow.pause", "workflow.resume")} == {"ada"}


def test_a_dead_letter_is_sent_back_and_another_dropped_and_the_plan_shows_what_would_be_sent(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    with Celery("theirs", broker=shop.installation.broker_url) as theirs:
        for name in ("letter-1", "letter-2"):
            event = {"topic": "orders.unknown", "message_id": name, "payload": {"card": CARD}}
            BrokerClient(theirs).publish("shop", [event])
    page = open_page("/", base=shop.process_url, extra_http_headers={"X-User": "carol"})
    expect(page.locator(".headline", has_text="2 messages refused")).to_be_visible(timeout=60_000)
    page.locator(".headline", has_text="2 messages refused").click()
    page.get_by_role("link", name="The messages").click()
    assert CARD not in page.content()
    back, dropped = (page.locator("tr[data-row]", has_text=name) for name in ("letter-1", "letter-2"))
    back.get_by_label("Why").fill("the topic is there now")
    back.get_by_role("button", name="Send back").click()
    message(page).to_contain_text("Sent back.")
    dropped.get_by_label("Why").fill("a test of theirs")
    dropped.get_by_role("button", name="Drop").click()
    message(page).to_contain_text("Dropped.")
    expect(dropped).to_have_count(0)
    assert shop.acts("dead_letter.send_back", "dead_letter.drop") == [
        ("carol", "the topic is there now"),
        ("carol", "a test of theirs"),
    ]
    shop.publish("orders.returned", "plan-1", amount="12.00")  # its approval waits, so it is not sent yet
    shop.wait_for_status("plan-1", "pending")
    page.goto(f"{shop.process_url}/w/shop")
    page.get_by_role("link", name="Plan").click()
    expect(page.locator("tr", has_text="plan-1")).to_contain_text("Refund 12.00 EUR for order plan-1")


def test_a_token_is_shown_once_and_refused_after_it_is_revoked(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page("/account")
    page.locator("#name").fill("robot")
    page.get_by_role("button", name="Create").click()
    secret = page.locator(".callout code").text_content() or ""

    def me() -> httpx.Response:
        return httpx.get(f"{shop.url}/v1/me", headers={"Authorization": f"Bearer {secret}"}, timeout=30)

    assert (me().status_code, me().json()["name"], me().json()["role"]) == (200, "robot", "viewer")
    page.goto(f"{shop.url}/account")
    assert secret not in page.content()
    page.get_by_role("button", name="Revoke robot").click()
    message(page).to_contain_text("Revoked.")
    expect(page.locator("tr", has_text="robot")).to_contain_text("revoked by ada")
    assert me().status_code == 401


def test_a_view_is_saved_used_and_deleted(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.question("view-1")
    page = open_page("/?q=view-1")
    page.locator("#view-name").fill("Only view-1")
    page.get_by_role("button", name="Save view").click()
    page.goto(shop.url)
    page.get_by_role("link", name="Only view-1").click()
    expect(page.locator("#items .headline")).to_have_count(1)
    other = open_page("/", person="bob")
    expect(other.get_by_role("link", name="Only view-1")).to_have_count(0)
    page.goto(f"{shop.url}/account")
    page.get_by_role("button", name="Delete the view Only view-1").click()
    expect(page.get_by_role("link", name="Only view-1")).to_have_count(0)


def test_a_late_effect_comes_first_and_is_acknowledged(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page(shop.question("late-1"))
    give_answer(page, "skip")
    message(page).to_contain_text("Recorded: skipped.")
    with shop.installation.db.transaction() as tx:  # as the sweep that monitors does, minutes later
        late_effects.record_late_effect(tx, shop.mutation("late-1").id, {"id": "ch_late"}, Actor(name="reconcile"))
    page.goto(shop.url)
    expect(page.locator("#items .headline").first).to_contain_text("order late-1")
    page.locator("#items .headline").first.click()
    expect(page).to_have_url(re.compile("/m/"))  # it opens beside the list
    expect(page.locator("#question-title")).to_contain_text("is it there twice?")
    page.locator("#reason").fill("there is one charge")
    page.get_by_role("button", name="Acknowledge").click()
    message(page).to_contain_text("Acknowledged.")
    assert shop.mutation("late-1").acknowledged_by == "ada"


def test_without_its_stream_a_page_asks_by_itself_and_a_paused_one_does_not(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    shop.question("cut-before")
    page = open_page("/audit")
    page.route("**/v1/attention/stream", lambda route: route.abort())
    page.goto(f"{shop.url}/?q=order+cut-")
    expect(page.locator(".live-text")).to_have_text("polling", timeout=30_000)
    shop.question("cut-1")
    expect(page.locator("#new-bar button")).to_have_text("1 new, show", timeout=30_000)
    page.keyboard.press("n")
    page.keyboard.press("p")
    expect(page.locator(".live-text")).to_have_text("paused")
    shop.question("cut-2")
    page.unroute("**/v1/attention/stream")
    page.keyboard.press("p")
    expect(page.locator("#new-bar button")).to_have_text("1 new, show", timeout=30_000)
    expect(page.locator(".live-text")).to_have_text("live", timeout=30_000)


def test_a_stale_page_is_refused_and_keeps_what_was_typed(open_page: OpenPage, shop: ConsoleShop) -> None:
    path = shop.question("stale-1")
    page, other = open_page(path), open_page(path, person="bob")
    page.locator("input[name=answer][value=happened]").check()
    page.locator("#reason").fill("a long story")
    page.locator("#external_id").fill("ch_stale")
    page.keyboard.press("Escape")
    page.keyboard.press("p")
    shop.tell("stale-1", "found")
    give_answer(other, "try_again")
    message(other).to_contain_text("The connector asks again.")
    shop.wait_for_status("stale-1", "applied")
    page.locator("[data-submit]").click()
    message(page).to_contain_text("It has changed since it was shown.")
    message(page).to_contain_text("status was indeterminate, is applied")
    expect(page.locator(".kept-text")).to_contain_text("a long story")
    expect(page.locator(".kept-text")).to_contain_text("ch_stale")


def test_a_viewer_sees_no_buttons_and_is_refused(open_page: OpenPage, shop: ConsoleShop) -> None:
    path = shop.question("viewer-1")
    page = open_page(path, person="vera")
    expect(page.locator("#question-title")).to_contain_text("order viewer-1")
    assert page.locator("main button:visible:not(.copy)").count() == 0
    assert page.locator("main form[method=post]:not([action$='/account/views'])").count() == 0
    body = page.evaluate(
        """async (path) => (await fetch(path, {method: 'POST', headers: {Accept: 'text/html'},
        body: new URLSearchParams({answer: 'skip', reason: 'x', csrf_token:
        document.querySelector('[name=csrf_token]').value})})).status""",
        f"{path}/resolve",
    )
    assert (body, shop.mutation("viewer-1").status) == (403, "indeterminate")


def test_a_question_is_answered_by_the_keyboard_alone(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.question("keys-1")
    page = open_page("/?q=keys-1")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.locator("[data-bulk-count]")).to_have_text("1 selected")
    page.keyboard.press("x")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{shop.url}/m/{shop.mutation('keys-1').id}")
    page.keyboard.press("e")
    expect(page.locator("input[name=answer]").first).to_be_focused()
    expect(page.locator("input[value=did_not_happen]")).to_be_enabled()  # the request can no longer arrive
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(page.locator("input[value=skip]")).to_be_checked()
    page.locator("input[value=skip]").press("Tab")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    message(page).to_contain_text("Recorded: skipped.")
    expect(page.locator(".message")).to_be_focused()


def test_everything_fits_on_a_phone_and_the_question_has_a_page_of_its_own(
    open_page: OpenPage, shop: ConsoleShop
) -> None:
    path = shop.question("phone-1")
    page = open_page("/?q=phone-1", width=390, has_touch=True)
    expect(page.locator("#pane")).to_be_hidden()
    page.locator(".headline", has_text="order phone-1").tap()
    expect(page.locator("#question-title")).to_be_visible()
    expect(page.locator(".inbox-list")).to_be_hidden()
    for each in (path, *PAGES):
        page.goto(shop.url + each)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{each} scrolls sideways by {wide} px"


def test_one_hit_of_a_search_is_opened_at_once(open_page: OpenPage, shop: ConsoleShop) -> None:
    shop.question("find-me-1")
    page = open_page("/w")
    page.keyboard.press("/")
    page.keyboard.type("find-me-1")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("What happened to find-me-1")
    expect(page.locator(".tree")).to_contain_text("pay.charge")


def test_it_works_without_a_script(open_page: OpenPage, shop: ConsoleShop) -> None:
    page = open_page(shop.question("plain-1"), java_script_enabled=False)
    give_answer(page, "skip")
    message(page).to_contain_text("Recorded: skipped.")
    assert shop.mutation("plain-1").status == "failed"


def test_it_works_under_a_prefix_of_another_app(open_page: OpenPage, shop: ConsoleShop) -> None:
    path = shop.question("prefix-1")
    page = open_page("/?q=prefix-1", base=shop.mounted_url)
    page.locator(".headline").first.click()
    expect(page).to_have_url(f"{shop.mounted_url}{path}")
    give_answer(page, "skip")
    message(page).to_contain_text("Recorded: skipped.")
    links = page.eval_on_selector_all("a[href], form[action]", "all => all.map(each => each.href || each.action)")
    outside = [link for link in links if not link.startswith((shop.mounted_url, "https://dashboard.payments.example"))]
    assert outside == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_violation(open_page: OpenPage, shop: ConsoleShop, theme: str) -> None:
    path = shop.question(f"axe-{theme}")
    shop.publish("orders.placed", f"poison-{theme}")
    shop.publish("orders.returned", f"axe-return-{theme}", amount="9000.00")
    approval = f"/m/{shop.wait_for_status(f'axe-return-{theme}', 'pending').id}"
    run, event = shop.mutation(f"axe-{theme}").run_id, shop.event_id(f"axe-{theme}")
    page = open_page(path, color_scheme=theme)
    page.locator("input[value=happened]").check()
    rules = {} if theme == "light" else {"runOnly": ["color-contrast"]}  # a theme changes nothing else
    found = {path: _violations(page, rules)}
    for each in (approval, f"/r/{run}", f"/e/{event}", *PAGES):
        page.goto(shop.url + each)
        found[each] = _violations(page, rules)
    assert {where: what for where, what in found.items() if what} == {}


def _violations(page: Page, rules: Any) -> list[str]:
    page.evaluate(AXE.read_text())
    found: list[str] = page.evaluate(_VIOLATIONS, rules)
    return found
