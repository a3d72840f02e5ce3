"""The pictures of the documentation, taken from a real shop when ``CONSOLE_PICTURES`` names a folder for them."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.console.conftest import OpenPage
from tests.support.console_shop import ConsoleShop

FOLDER = os.environ.get("CONSOLE_PICTURES", "")

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not FOLDER, reason="CONSOLE_PICTURES names no folder for the pictures"),
]


def test_the_pictures_of_the_documentation_are_taken(open_page: OpenPage, shop: ConsoleShop) -> None:
    folder = Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    for order in ("4600", "4601"):
        shop.tell(order, "answers")
        shop.order(order, "35.00")
    path = shop.question("4711", "99.01")
    for order, amount in (("4712", "1240.00"), ("4713", "18.50"), ("4714", "7.99")):
        shop.question(order, amount)
    shop.publish("months.closed", "2026-10-muller", seller="Müller GmbH", amount="3120.40")
    shop.publish("orders.placed", "4720")
    shop.publish("issues.ready", "issue-7", workflow="newsletter")
    shop.publish("orders.returned", "4490", amount="9000.00")
    shop.publish("orders.returned", "4502", amount="12.00")
    for message_id, status in (("2026-10-muller", "indeterminate"), ("4490", "pending"), ("4502", "pending")):
        shop.wait_for_status(message_id, status)
    for theme in ("light", "dark"):
        page = open_page("/", color_scheme=theme)
        expect(page.locator(".items")).to_contain_text("newsletter is in maintenance")
        page.screenshot(path=folder / f"inbox-{theme}.png")
    page = open_page(path, color_scheme="light")
    page.locator("input[value=did_not_happen]").check()
    page.locator("#confirm").fill("4711")
    page.locator("#reason").fill("Not in the provider's list of today")
    page.locator("#question-title").focus()
    page.locator("#pane").evaluate("pane => { pane.scrollTop = 190; }")
    page.screenshot(path=folder / "question-light.png")
    page = open_page(path, color_scheme="light", width=390)
    page.screenshot(path=folder / "question-phone.png")
    page = open_page("/w/shop", color_scheme="light")
    page.screenshot(path=folder / "workflow-light.png")
