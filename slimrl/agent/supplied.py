"""What a run gives to the functions that ask for it by the annotation of a parameter."""

from typing import Any

from pydantic_core import core_schema


class Supplied:
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """A schema by which pydantic takes the value as it is, where a tool's arguments are checked."""
        return core_schema.is_instance_schema(cls)
