"""The two bases of every message on the wire: closed (unknown fields refused) and open."""

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """Frozen; an unknown field is an error that names its path."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenContract(BaseModel):
    """Frozen; fields that are not declared are kept as they came."""

    model_config = ConfigDict(extra="allow", frozen=True)
