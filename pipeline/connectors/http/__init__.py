"""Connector for HTTP APIs."""

from pipeline.connectors.http.connector import Http
from pipeline.connectors.http.exchange import UnclearResponseError
from pipeline.connectors.http.operations import delete, get, patch, post, put

__all__ = ["Http", "UnclearResponseError", "delete", "get", "patch", "post", "put"]
