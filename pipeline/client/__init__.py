"""How other services publish events: in their own transaction, or through a client."""

from pipeline.client.asynchronous import AsyncClient, publish_async
from pipeline.client.http import HttpClient
from pipeline.client.publishing import (
    BrokerClient,
    DatabaseClient,
    EventInput,
    Receipt,
    publish,
)
from pipeline.config import database_url_of
from pipeline.domain.errors import RefusedError, UnavailableError
from pipeline.domain.values import Limits

__all__ = [
    "AsyncClient",
    "BrokerClient",
    "DatabaseClient",
    "EventInput",
    "HttpClient",
    "Limits",
    "Receipt",
    "RefusedError",
    "UnavailableError",
    "database_url_of",
    "publish",
    "publish_async",
]
