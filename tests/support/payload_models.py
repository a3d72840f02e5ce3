"""Models whose JSON is not simply their fields."""

from pydantic import BaseModel, ConfigDict, Field, computed_field


class Aliased(BaseModel):
    """Read by another name than it has in Python."""

    order_id: str = Field(alias="orderId")


class Computed(BaseModel):
    """Has more to show than it reads."""

    model_config = ConfigDict(extra="forbid")

    a: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def b(self) -> int:
        return self.a + 1
