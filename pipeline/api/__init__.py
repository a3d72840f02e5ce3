"""The HTTP API and the operator console: an ASGI app of its own, or mounted into an application."""

from pipeline.api.access import Person
from pipeline.api.app import create
from pipeline.domain.access import Role

__all__ = ["Person", "Role", "create"]
