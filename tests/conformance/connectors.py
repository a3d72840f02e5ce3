"""Connectors to the small server: an honest one of each grade, and liars with one lie each."""

import threading
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import SecretStr

from pipeline.connectors.readings import Outcome, Reading
from pipeline.connectors.sdk import Applied, Call, Connector, NotFound, Retry, Verdict, mutation
from pipeline.domain.errors import LogicError, TransientError
from tests.conformance.world import AnswerError, get, post

TOKEN = "tok-5f2b9c"
#: The small server answers from what it has just written: nothing surfaces after the deadline.
at_once = partial(mutation, settle=timedelta(0))


class Base(Connector):
    """Where the server is, and what it is told."""

    def __init__(self, url: str) -> None:
        self.url, self.token = url, SecretStr(TOKEN)

    def keyed(self, call: Call, what: str) -> dict[str, Any]:
        return post(self.url, "/keyed", call, {"what": what}, self.token.get_secret_value())

    def plain(self, call: Call, what: str) -> dict[str, Any]:
        return post(self.url, "/plain", call, {"what": what}, self.token.get_secret_value())

    def found(self, call: Call) -> Verdict:
        answer = get(self.url, call)
        match answer.status_code:
            case 200:
                return Applied(answer.body)
            case 404:
                return NotFound()
        return Retry(f"the server answered {answer.status_code}")


class HonestA(Base):
    """Keyed, and can be asked."""

    name = "honest-a"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, **_: Any) -> Verdict:
        return self.found(call)


class HonestB(Base):
    """Can be asked; some of its methods are coroutines."""

    name = "honest-b"

    @mutation(settle=timedelta(milliseconds=300))
    async def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.plain(call, what)

    @make.reconcile
    async def find(self, call: Call, **_: Any) -> Verdict:
        return self.found(call)


class HonestC(Base):
    """Keyed, and nobody can be asked."""

    name = "honest-c"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)


class HonestD(Base):
    """Neither."""

    name = "honest-d"

    @at_once()
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.plain(call, what)


class SaysRefusedOnReset(Base):
    name = "says-refused-on-reset"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except ConnectionResetError as error:
            raise LogicError("the server does not want it") from error


class SaysNotNowOnTimeout(Base):
    name = "says-not-now-on-timeout"

    @at_once()
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.plain(call, what)
        except TimeoutError as error:
            raise TransientError("the server is slow, try again") from error


class NeverFinds(Base):
    name = "never-finds"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, _: Call, **__: Any) -> Verdict:
        return NotFound()


class TakesSilenceForAbsence(Base):
    name = "takes-silence-for-absence"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, **_: Any) -> Verdict:
        try:
            return self.found(call)
        except OSError:
            return NotFound("the server did not answer")


class TakesRefusalForAbsence(Base):
    name = "takes-refusal-for-absence"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, **_: Any) -> Verdict:
        try:
            return self.found(call)
        except ConnectionRefusedError:
            return NotFound("there is not even a server")


class AlwaysFinds(Base):
    name = "always-finds"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, **_: Any) -> Verdict:
        return Applied({"id": f"thing-{call.idempotency_key}"})


class FindsSomethingElse(Base):
    name = "finds-something-else"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, **_: Any) -> Verdict:
        found = self.found(call)
        return Applied({"id": "thing-of-somebody-else"}) if isinstance(found, Applied) else found


class AnswersWithAWord(Base):
    name = "answers-with-a-word"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, _: Call, **__: Any) -> Any:
        return "found it"


class SendsToFindOut(Base):
    name = "sends-to-find-out"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, *, what: str) -> Verdict:
        return Applied(self.keyed(call, what))


class IgnoresTheDeadline(Base):
    name = "ignores-the-deadline"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(Call.within(call.idempotency_key, timedelta(seconds=3)), what)


class SendsAfterTheDeadline(Base):
    name = "sends-after-the-deadline"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except TimeoutError:
            threading.Event().wait(0.4)
            return self.keyed(Call.within(call.idempotency_key, timedelta(seconds=1)), what)


class ClaimsToBeKeyed(Base):
    name = "claims-to-be-keyed"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.plain(call, what)


class RetriesInside(Base):
    name = "retries-inside"

    @at_once()
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.plain(call, what)
        except ConnectionResetError:
            return self.plain(call, what)


class TellsItsToken(Base):
    name = "tells-its-token"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except OSError as error:
            raise TimeoutError(f"no answer to a request with Bearer {self.token.get_secret_value()}") from error


def _no_for_5xx(error: BaseException) -> Reading | None:
    failed = isinstance(error, AnswerError) and error.response.status_code >= 500
    return Reading(outcome=Outcome.NOT_NOW) if failed else None


class ReadsAnErrorAsNo(Base):
    name = "reads-an-error-as-no"

    @at_once(keyed=True, errors=_no_for_5xx)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)


class InventsItsResult(Base):
    name = "invents-its-result"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except OSError:
            return {"id": "surely"}


class SendsTwiceAndComplains(Base):
    name = "sends-twice-and-complains"

    @at_once()
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        self.plain(call, what)
        self.plain(call, what)
        raise TimeoutError("it took too long")


class RefusesASecondTime(Base):
    name = "refuses-a-second-time"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.known: set[str] = set()

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        if call.idempotency_key in self.known:
            raise LogicError("it was sent before")
        self.known.add(call.idempotency_key)
        return self.keyed(call, what)


class ReadsAGatewaysErrorAsNo(Base):
    name = "reads-a-gateways-error-as-no"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except AnswerError as error:
            if error.response.status_code == 504:
                raise TransientError("the gateway gave up") from error
            raise


class ShowsItsToken(Base):
    name = "shows-its-token"

    def __repr__(self) -> str:
        return f"ShowsItsToken({self.url!r}, {self.token.get_secret_value()!r})"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)


class TellsItsTokenWhenAsked(Base):
    name = "tells-its-token-when-asked"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, _: Call, **__: Any) -> Verdict:
        return Retry(f"asked with Bearer {self.token.get_secret_value()}, and nobody answered")


class NeverWorks(Base):
    name = "never-works"

    @at_once()
    def make(self, _: Call, *, what: str) -> dict[str, Any]:
        raise ValueError(f"cannot make {what} with {self.token.get_secret_value()}")
