"""Connector for HTTP APIs."""

from pipeline.connectors.http.answers import UnclearResponseError
from pipeline.connectors.http.connector import Http
from pipeline.connectors.http.operations import HttpOperation, delete, get, patch, post, put

__all__ = ["Http", "HttpOperation", "UnclearResponseError", "delete", "get", "patch", "post", "put"]
