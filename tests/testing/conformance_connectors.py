"""Connectors to the small server: an honest one of each grade, and liars with one lie each."""

import threading
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import SecretStr

from pipeline.connectors.sdk import Call, Connector, mutation
from pipeline.domain.errors import LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict
from tests.testing.conformance_server import AnswerError, get, post

TOKEN = "tok-5f2b9c"
#: The small server answers from what it has just written: nothing surfaces after the deadline.
at_once = partial(mutation, settle=timedelta(0))


class Base(Connector):
    """The address of the server, and what is sent to it."""

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


class Keyed(Base):
    """Honours the key. A false connector returns something else in ``sends``."""

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.sends(call, what)

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        return self.keyed(call, what)


class Plain(Base):
    """Knows no key."""

    @at_once()
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.sends(call, what)

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        return self.plain(call, what)


class HonestA(Base):
    """Keyed, and can reconcile. A false connector returns something else in ``says``."""

    name = "honest-a"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)

    @make.reconcile
    def find(self, call: Call, *, what: str) -> Verdict:
        return self.says(call, what)

    def says(self, call: Call, _: str, /) -> Verdict:
        return self.found(call)


class Strict(Base):
    """Talks to a server that keeps the first body of a key. A false connector says something else in ``sends``."""

    def strict(self, call: Call, what: str) -> dict[str, Any]:
        return post(self.url, "/strict", call, {"what": what}, self.token.get_secret_value())


def _taken_key_is_unknown(error: BaseException) -> ErrorReading | None:
    is_taken = isinstance(error, AnswerError) and error.response.status_code == 422
    return ErrorReading(meaning=ErrorMeaning.UNKNOWN) if is_taken else None


class HonestStrict(Strict):
    """Reads a taken key as unknown, and says how long keys are kept."""

    name = "honest-strict"

    @at_once(keyed=True, key_lifetime=timedelta(hours=24), errors=_taken_key_is_unknown)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.strict(call, what)


class ReadsATakenKeyAsNo(Strict):
    name = "reads-a-taken-key-as-no"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.strict(call, what)


class ReadsAReplayAsNo(Strict):
    name = "reads-a-replay-as-no"

    @at_once(keyed=True)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        answer = self.strict(call, what)
        if "replayed" in answer:
            raise LogicError("it was sent before")
        return answer


class HonestB(Base):
    """Can be asked; some of its methods are coroutines."""

    name = "honest-b"

    @mutation(settle=timedelta(milliseconds=300))
    async def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.plain(call, what)

    @make.reconcile
    async def find(self, call: Call, **_: Any) -> Verdict:
        return self.found(call)


class HonestC(Keyed):
    """Keyed, and cannot reconcile."""

    name = "honest-c"


class HonestD(Plain):
    """Neither."""

    name = "honest-d"


class SaysRefusedOnReset(Keyed):
    name = "says-refused-on-reset"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except ConnectionResetError as error:
            raise LogicError("the server does not want it") from error


class SaysNotNowOnTimeout(Plain):
    name = "says-not-now-on-timeout"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.plain(call, what)
        except TimeoutError as error:
            raise TransientError("the server is slow, try again") from error


class NeverFinds(HonestA):
    name = "never-finds"

    def says(self, _: Call, __: str, /) -> Verdict:
        return NotFound()


class TakesSilenceForAbsence(HonestA):
    name = "takes-silence-for-absence"

    def says(self, call: Call, _: str, /) -> Verdict:
        try:
            return self.found(call)
        except OSError:
            return NotFound("the server did not answer")


class TakesRefusalForAbsence(HonestA):
    name = "takes-refusal-for-absence"

    def says(self, call: Call, _: str, /) -> Verdict:
        try:
            return self.found(call)
        except ConnectionRefusedError:
            return NotFound("there is not even a server")


class AlwaysFinds(HonestA):
    name = "always-finds"

    def says(self, call: Call, _: str, /) -> Verdict:
        return Applied({"id": f"thing-{call.idempotency_key}"})


class FindsSomethingElse(HonestA):
    name = "finds-something-else"

    def says(self, call: Call, _: str, /) -> Verdict:
        found = self.found(call)
        return Applied({"id": "thing-of-somebody-else"}) if isinstance(found, Applied) else found


class AnswersWithAWord(HonestA):
    name = "answers-with-a-word"

    def says(self, _: Call, __: str, /) -> Any:
        return "found it"


class SendsToFindOut(HonestA):
    name = "sends-to-find-out"

    def says(self, call: Call, what: str, /) -> Verdict:
        return Applied(self.keyed(call, what))


class IgnoresTheDeadline(Keyed):
    name = "ignores-the-deadline"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        return self.keyed(Call.within(call.idempotency_key, timedelta(seconds=3)), what)


class SendsAfterTheDeadline(Keyed):
    name = "sends-after-the-deadline"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except TimeoutError:
            threading.Event().wait(0.4)
            return self.keyed(Call.within(call.idempotency_key, timedelta(seconds=1)), what)


class ClaimsToBeKeyed(Keyed):
    name = "claims-to-be-keyed"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        return self.plain(call, what)


class RetriesInside(Plain):
    name = "retries-inside"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.plain(call, what)
        except ConnectionResetError:
            return self.plain(call, what)


class TellsItsToken(Keyed):
    name = "tells-its-token"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except OSError as error:
            raise TimeoutError(f"no answer to a request with Bearer {self.token.get_secret_value()}") from error


def _no_for_5xx(error: BaseException) -> ErrorReading | None:
    failed = isinstance(error, AnswerError) and error.response.status_code >= 500
    return ErrorReading(meaning=ErrorMeaning.NOT_NOW) if failed else None


class ReadsAnErrorAsNo(Base):
    name = "reads-an-error-as-no"

    @at_once(keyed=True, errors=_no_for_5xx)
    def make(self, call: Call, *, what: str) -> dict[str, Any]:
        return self.keyed(call, what)


class InventsItsResult(Keyed):
    name = "invents-its-result"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except OSError:
            return {"id": "surely"}


class SendsTwiceAndComplains(Plain):
    name = "sends-twice-and-complains"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        self.plain(call, what)
        self.plain(call, what)
        raise TimeoutError("it took too long")


class RefusesASecondTime(Keyed):
    name = "refuses-a-second-time"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.known: set[str] = set()

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        if call.idempotency_key in self.known:
            raise LogicError("it was sent before")
        self.known.add(call.idempotency_key)
        return self.keyed(call, what)


class ReadsAGatewaysErrorAsNo(Keyed):
    name = "reads-a-gateways-error-as-no"

    def sends(self, call: Call, what: str, /) -> dict[str, Any]:
        try:
            return self.keyed(call, what)
        except AnswerError as error:
            if error.response.status_code == 504:
                raise TransientError("the gateway gave up") from error
            raise


class ShowsItsToken(Keyed):
    name = "shows-its-token"

    def __repr__(self) -> str:
        return f"ShowsItsToken({self.url!r}, {self.token.get_secret_value()!r})"


class TellsItsTokenWhenAsked(HonestA):
    name = "tells-its-token-when-asked"

    def says(self, _: Call, __: str, /) -> Verdict:
        return Retry(f"asked with Bearer {self.token.get_secret_value()}, and nobody answered")


class NeverWorks(Plain):
    name = "never-works"

    def sends(self, _: Call, what: str, /) -> dict[str, Any]:
        raise ValueError(f"cannot make {what} with {self.token.get_secret_value()}")
