"""Types of ids, so that mypy tells one from another."""

from typing import NewType
from uuid import UUID

RunId = NewType("RunId", UUID)
MutationId = NewType("MutationId", UUID)
SessionId = NewType("SessionId", UUID)
EventId = NewType("EventId", int)
HandlerId = NewType("HandlerId", int)
Fence = NewType("Fence", int)
