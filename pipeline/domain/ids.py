"""Names for identifiers, so that the type checker refuses a run's id where a mutation's is wanted."""

from typing import NewType
from uuid import UUID

RunId = NewType("RunId", UUID)
MutationId = NewType("MutationId", UUID)
SessionId = NewType("SessionId", UUID)
EventId = NewType("EventId", int)
HandlerId = NewType("HandlerId", int)
Fence = NewType("Fence", int)
