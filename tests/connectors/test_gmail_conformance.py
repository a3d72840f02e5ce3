"""The shipped connector gmail says the truth whatever breaks between it and a stand-in for the API."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from pipeline.connectors import Grade
from pipeline.connectors.gmail import Gmail
from pipeline.testing import FaultyProxy, Subject, is_complete_http_request
from tests.connectors.fake_gmail import TOKEN, StandIn, stand_in
from tests.support.conformance_retries import patient


@pytest.fixture
def api() -> Iterator[StandIn]:
    """Its search sees a mail only after a while, as that of the real one."""
    with stand_in() as api:
        api.indexes_at_once = False
        over = threading.Event()

        def index() -> None:
            while not over.wait(0.1):
                api.index()

        thread = threading.Thread(target=index, daemon=True)
        thread.start()
        yield api
        over.set()
        thread.join()


def test_a_mail_conforms_to_its_declared_grade(api: StandIn) -> None:
    place = urlsplit(api.url)
    with FaultyProxy(place.hostname or "", place.port or 0, is_complete=is_complete_http_request) as proxy:
        subject = Subject(
            connector=Gmail(token=SecretStr(TOKEN), base_url=proxy.url, sender="shop@example.com"),
            operation="send",
            params={"to": "ada@example.org", "subject": "Your receipt", "text": "Thank you."},
            effects=api.times,
            proxy=proxy,
            timeout=timedelta(milliseconds=400),
            settle=timedelta(milliseconds=400),
            result_parts=["id", "threadId", "message_id"],
        )
        patient(subject).require(Grade.B)
