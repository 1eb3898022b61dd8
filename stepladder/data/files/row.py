"""One row of a data file under its columns' names, and the values that several formats share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepladder.data.files.disk import loads, refuse
from stepladder.data.files.messages import (
    dialogue,
    is_dialogue,
    is_messages,
    is_printed_list,
    messages_from,
    tools_from,
)
from stepladder.errors import DataError, nearest
from stepladder.types import Message, Role, Tool

SYSTEM_COLUMNS = ("system", "system_prompt")
SHARED_COLUMNS = (("tools",), SYSTEM_COLUMNS)


@dataclass(frozen=True, slots=True)
class Row:
    """A row, the words that name it in errors, and what is to be said about the file as a whole."""

    values: Mapping[str, Any]
    where: str
    notes: Counter[str] = field(default_factory=Counter)

    def find(self, *names: str) -> tuple[Any, str] | None:
        """(value, where) of the first of these columns that holds something; None where none does."""
        for name in names:
            if present(self.values.get(name)):
                return self.values[name], self.field(name)
        return None

    def need(self, *names: str) -> tuple[Any, str]:
        """The same for a column that must be there: an error where it is missing or null."""
        found = self.find(*names)
        if found is None:
            name = next((n for n in names if n in self.values), names[0])
            if name in self.values:
                refuse(self.field(name), "must not be null", None)
            hint = nearest(name, map(str, self.values))
            columns = ", ".join(map(str, self.values))
            raise DataError(f"{self.field(name)}: is missing; got the columns {columns}.{hint}")
        return found

    def field(self, name: str) -> str:
        return f"{self.where}, field {name}"

    def tools(self) -> tuple[Tool, ...]:
        """The tools of the row; none where the column is missing or blank."""
        found = self.find("tools")
        return () if found is None else tools_from(*found)

    def with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """`messages` after the text of a system column, unless they begin with a system message."""
        found = self.find(*SYSTEM_COLUMNS)
        if found is None or found[0] == "":
            return messages
        if messages[0].role == "system":
            if messages[0].text != text_of(*found):
                self.notes["system column left out for the message's own"] += 1
            return messages
        return (Message("system", text_of(*found)), *messages)

    def prompt(self, *names: str) -> tuple[Message, ...] | None:
        """The messages of a prompt column; None where it is missing or blank."""
        found = self.find(*names)
        if found is None or found[0] == "" or found[0] == []:
            return None
        messages = turns(*found, "user")
        if messages[-1].role == "assistant" and not messages[-1].content:
            messages = messages[:-1]  # a dialogue string that ends with "Assistant:"
        if not messages or messages[-1].role == "assistant":
            refuse(
                found[1], "must end with a message of the user or of a tool, not of the assistant", found[0]
            )
        return self.with_system(messages)


def present(value: Any) -> bool:
    """Is there a value? Columns of one type say null, and tables made of floats say NaN."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        refuse(where, "must be a string", value)
    return value


def turns(value: Any, where: str, role: Role) -> tuple[Message, ...]:
    """Messages of a value that is a text said by `role`, a dialogue string, a message or a list of them."""
    if isinstance(value, Mapping):
        value = [value]
    if is_messages(value) or not isinstance(value, str):
        return messages_from(value, where)
    if is_printed_list(value):
        refuse(where, "is a list of messages as Python prints it; write it as JSON (json.dumps)", value)
    return dialogue(value) if is_dialogue(value) else (Message(role, value),)


def list_of(value: Any, where: str) -> list[Any]:
    """A list, or a JSON string of one."""
    if isinstance(value, str):
        value = loads(value, where)
    if not isinstance(value, Sequence) or isinstance(value, str):
        refuse(where, "must be a list", value)
    return list(value)


def number(value: Any, where: str) -> float:
    """A finite number, or a string that spells one (cells of a CSV file)."""
    try:
        if not isinstance(value, bool | int | float | str):
            raise ValueError
        found = float(value)
    except ValueError:
        refuse(where, "must be a number", value)
    except OverflowError:  # an integer of hundreds of digits
        refuse(where, "must be finite", value)
    if not math.isfinite(found):
        refuse(where, "must be finite", value)
    return found


def thumb(value: Any, where: str) -> bool:
    """True or false, 1 or 0, "true" or "false"."""
    spelled = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    answer = spelled.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if answer is None:
        refuse(where, 'must be true or false, 1 or 0, "true" or "false"', value)
    return answer
