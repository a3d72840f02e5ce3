"""Pipeline in a FastAPI or Starlette application: a lifespan, and a dependency that publishes."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import Depends
from sqlalchemy.exc import SQLAlchemyError

from pipeline.client import AsyncClient, Receipt
from pipeline.client.publishing import EventInputs

log = logging.getLogger(__name__)

__all__ = ["Publish", "lifespan", "publisher"]


class Publish(Protocol):
    """A function that publishes in the session of a request. The endpoint commits."""

    def __call__(self, workflow: str, events: EventInputs, *, replace: bool = False) -> Awaitable[Receipt]: ...


def lifespan(client: AsyncClient) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return the lifespan of an application: it checks the schema first, and closes the client at the end.

    An application does not start on a database that was not migrated. It starts while the database is away.
    """

    @asynccontextmanager
    async def run(_: Any) -> AsyncIterator[None]:
        try:
            await _check_schema(client)
            yield
        finally:
            await client.close()

    return run


async def _check_schema(client: AsyncClient) -> None:
    try:
        await client.check_schema()
    except (SQLAlchemyError, OSError) as error:
        log.warning("the version of the database could not be checked: %s", error)


def publisher(client: AsyncClient, session_of: Callable[..., Any]) -> Callable[..., Publish]:
    """Return a dependency that publishes in the ``AsyncSession`` of another dependency, and wakes after its commit."""

    def depend(session: Annotated[Any, Depends(session_of)]) -> Publish:
        return partial(client.publish_in, session)

    return depend
