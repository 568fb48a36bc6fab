"""The base class of every value, and the types of fields that hold text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from launcher.spec.text import no_nul
from launcher.spec.variables import usable_name


class Value(BaseModel):
    """A frozen, printable value. Unknown fields are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        defer_build=True,  # each verb uses only a few of the models
    )


def number_as_text(value: Any) -> Any:
    """Turn a Python number into text. Numbers from files are text already (see launcher.spec.field_types)."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(number_as_text, json_schema_input_type=str | int | float | bool)]
EnvName = Annotated[
    str,
    AfterValidator(usable_name),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}),
]
Env = dict[EnvName, Annotated[Text, AfterValidator(no_nul)]]
