"""How large the things a workflow stores may be, in bytes of JSON."""

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Bounds that keep a cohort's statement small enough to stay fast."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    payload: int = Field(default=262_144, ge=1)
    prepare_result: int = Field(default=1_048_576, ge=1)
    params: int = Field(default=262_144, ge=1)
    result: int = Field(default=262_144, ge=1)
    state: int = Field(default=65_536, ge=1)


DEFAULT_LIMITS = Limits()
