"""What a row of each format means: one function a format, from a row to a record.

Each raises `DataError` naming the row and the field that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from stepladder.data.files.disk import refuse
from stepladder.data.files.messages import is_messages, numbered_messages
from stepladder.data.files.records import Demonstration, Preference, Ranking, Steps, Text, Unpaired
from stepladder.data.files.row import Row, list_of, number, present, text_of, thumb, turns
from stepladder.types import Message, Role

PROMPT = ("prompt", "instruction", "question", "query")
ANSWERS = ("completion", "response", "answer", "output")
CONVERSATION = ("messages", "conversations", "conversation")
RANKED = ("completions", "responses", "answers")
RANKS = ("ranks", "rank")
SCORES = ("scores", "score", "ratings", "rewards")
MARGINS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen-rating", "rejected-rating"),
)
_ITEM_TEXT = ("response", "answer", "completion", "text", "content")
_ITEM_SCORE = ("score", "overall_score", "rating", "reward")


def conversation(row: Row) -> Demonstration:
    value, where = row.need(*CONVERSATION)
    numbered = numbered_messages(value, where)
    _refuse_unlearnable([(i, m.role) for i, m in numbered], where)
    messages = row.with_system(tuple(m for _, m in numbered))
    _note_oddities(row, messages)
    return Demonstration(messages, row.tools())


def prompt_completion(row: Row) -> Demonstration:
    """A prompt and its completion; Alpaca's "input" belongs to the prompt."""
    answer, where = row.need(*ANSWERS)
    prompt = row.prompt(*PROMPT)
    if prompt is None:
        refuse(row.field(_column(row, PROMPT)), "must not be empty", "")
    given = row.find("input")
    if given is not None and given[0] != "":
        last = prompt[-1]
        prompt = (*prompt[:-1], Message(last.role, f"{last.text}\n\n{text_of(*given)}"))
    completion = _answer(answer, where)
    _note_oddities(row, completion)
    return Demonstration((*prompt, *completion), row.tools(), answers_from=len(prompt))


def text(row: Row) -> Text:
    value = text_of(*row.need("text"))
    if not value.strip():
        refuse(row.field("text"), "must not be empty", value)
    return Text(value)


def preference(row: Row) -> Preference:
    """Two answers to one prompt, which is given or is what both sides begin with."""
    (good, where_good), (bad, where_bad) = row.need("chosen"), row.need("rejected")
    prompt = row.prompt(*PROMPT)
    plain = isinstance(good, str) and isinstance(bad, str) and not (is_messages(good) or is_messages(bad))
    chosen, rejected = turns(good, where_good, "assistant"), turns(bad, where_bad, "assistant")
    if chosen[0].role == rejected[0].role == "assistant":
        if prompt is None and plain and len(chosen) == len(rejected) == 1:
            prompt, chosen, rejected = _common_text(row, good, bad)
        elif prompt is None:
            refuse(row.field("prompt"), "is missing, and chosen and rejected begin with an answer", None)
    else:
        prompt, chosen, rejected = _common_messages(row, prompt, chosen, rejected)
    for side, where in ((chosen, where_good), (rejected, where_bad)):
        _refuse_no_answer(side, where)
    _note_oddities(row, chosen, rejected)
    if chosen == rejected:
        row.notes["chosen equals rejected"] += 1
    margin = _margin(row)
    if margin is not None and margin < 0:
        row.notes["chosen is scored below rejected"] += 1
    return Preference(prompt, chosen, rejected, row.tools(), margin)


def unpaired(row: Row) -> Unpaired:
    value, where = row.need("completion", "response")
    label = thumb(*row.need("label"))
    prompt = row.prompt(*PROMPT)
    completion = turns(value, where, "assistant")
    if completion[0].role != "assistant":  # the whole conversation: the last answer is the one that is judged
        cut = max((i for i, m in enumerate(completion) if m.role == "assistant"), default=0)
        head, completion = completion[:cut], completion[cut:]
        if not head:
            refuse(where, "must hold an answer of the assistant", value)
        prompt = _agreed(row, prompt, head, "the completion begins")
    if prompt is None:
        refuse(row.field(_column(row, PROMPT)), "is missing: a completion is judged as an answer to it", None)
    _refuse_no_answer(completion, where)
    _note_oddities(row, completion)
    return Unpaired(prompt, completion, label, row.tools())


def ranking(row: Row) -> Ranking:
    """K answers with ranks (1 is the best), or scores (higher is better), or in order, best first."""
    value, where = row.need(*RANKED)
    items = list_of(value, where)
    if len(items) < 2:
        refuse(where, "must hold at least two completions", value)
    prompt = row.prompt(*PROMPT)
    if prompt is None:
        refuse(row.field(_column(row, PROMPT)), "must not be empty", "")
    answers = [_item_answer(item, f"{where}[{i}]") for i, item in enumerate(items)]
    _note_oddities(row, *answers)
    scored, lower = _item_scores(row, items, where)
    if scored is None:
        row.notes["order taken as best first"] += 1
        return Ranking(prompt, tuple(answers), row.tools())
    order = sorted(range(len(items)), key=lambda i: scored[i] if lower else -scored[i])
    values = [scored[i] for i in order]
    places = tuple(values.index(v) + 1 for v in values)
    ties = len(set(places)) < len(places)
    if ties:
        row.notes["equally good completions"] += 1
    return Ranking(
        prompt,
        tuple(answers[i] for i in order),
        row.tools(),
        ranks=places if ties else (),
        scores=() if lower else tuple(values),
    )


def items_are_ranked(row: Mapping[str, Any]) -> bool:
    """Do the completions carry a rank or a score each?"""
    items = next((row[name] for name in RANKED if present(row.get(name))), ())
    if not isinstance(items, Sequence) or isinstance(items, str):
        return False
    return bool(items) and all(
        isinstance(item, Mapping) and any(present(item.get(k)) for k in ("rank", *_ITEM_SCORE))
        for item in items
    )


def steps(row: Row) -> Steps:
    value, where = row.need("completions", "steps")
    pieces = tuple(text_of(step, f"{where}[{i}]") for i, step in enumerate(list_of(value, where)))
    if not pieces:
        refuse(where, "must hold at least one step", value)
    empty = next((i for i, piece in enumerate(pieces) if not piece.strip()), None)
    if empty is not None:
        refuse(f"{where}[{empty}]", "must not be empty", pieces[empty])
    prompt = row.prompt(*PROMPT)
    if prompt is None:
        refuse(row.field(_column(row, PROMPT)), "must not be empty", "")
    found = row.find("labels")
    if found is None:
        row.notes["labels to be found"] += 1
        return Steps(prompt, pieces)
    labels = [_step_label(x, f"{found[1]}[{i}]") for i, x in enumerate(list_of(*found))]
    if len(labels) != len(pieces):
        refuse(found[1], f"must hold one label for each of the {len(pieces)} steps", f"{len(labels)} labels")
    return Steps(prompt, pieces, tuple(labels))


# -- shared -----------------------------------------------------------------------------------------------


def _column(row: Row, names: Sequence[str]) -> str:
    """The one of these columns that the row has, for an error."""
    return next((name for name in names if name in row.values), names[0])


def _answer(value: Any, where: str) -> tuple[Message, ...]:
    messages = turns(value, where, "assistant")
    _refuse_no_answer(messages, where)
    return messages


def _refuse_no_answer(messages: Sequence[Message], where: str) -> None:
    """A completion begins with the assistant, who does not speak twice in a row."""
    if messages[0].role != "assistant":
        refuse(where, "must begin with a message of the assistant", [m.role for m in messages])
    if any(a.role == b.role == "assistant" for a, b in pairwise(messages)):
        refuse(where, "has two messages of the assistant in a row; join them into one", "")


def _refuse_unlearnable(numbered: Sequence[tuple[int, Role]], where: str) -> None:
    """A conversation to imitate holds an answer to something."""
    roles = [role for _, role in numbered]
    if "assistant" not in roles:
        refuse(where, "holds no message of the assistant, so nothing can be learned from it", roles)
    if next(role for role in roles if role != "system") == "assistant":
        index = numbered[roles.index("assistant")][0]
        refuse(f"{where}[{index}]", "is the assistant's, but nobody asked; begin with the user's", roles)
    for (_, a), (i, b) in pairwise(numbered):
        if a == b == "assistant":
            refuse(f"{where}[{i}]", "follows another of the assistant's; join them into one", roles)


def _note_oddities(row: Row, *sides: Sequence[Message]) -> None:
    """Empty answers are kept: they teach to end at once. What nobody answers is not. Both are said aloud."""
    if any(side[-1].role != "assistant" for side in sides):
        row.notes["messages after the last answer left out"] += 1
    if any(m.role == "assistant" and m.content == "" and not m.tool_calls for side in sides for m in side):
        row.notes["an empty answer"] += 1


def _margin(row: Row) -> float | None:
    found = row.find("margin")
    if found is not None:
        return number(*found)
    for high, low in MARGINS:
        a, b = row.find(high), row.find(low)
        if a is not None and b is not None:
            return number(*a) - number(*b)
    return None


def _common_text(
    row: Row, good: str, bad: str
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """(prompt, chosen, rejected) of two texts that begin with the same words."""
    same = next((i for i, (a, b) in enumerate(zip(good, bad)) if a != b), min(len(good), len(bad)))
    if len({good[same : same + 1], bad[same : same + 1]} - {"", " ", "\n"}) and same:
        # not inside a word: back to the white space before it
        same = max((m.start() for m in re.finditer(r"\s", good[:same])), default=0)
    if not good[:same].strip():
        refuse(row.field("prompt"), "is missing, and chosen and rejected begin with no words in common", None)
    row.notes["implicit prompt"] += 1
    prompt = row.with_system((Message("user", good[:same].strip()),))
    answers = [(Message("assistant", side[same:].strip()),) for side in (good, bad)]
    return prompt, answers[0], answers[1]


def _common_messages(
    row: Row,
    given: tuple[Message, ...] | None,
    chosen: tuple[Message, ...],
    rejected: tuple[Message, ...],
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """(prompt, chosen, rejected) of two conversations that begin with the same messages."""
    most = min(len(chosen), len(rejected)) - 1
    same = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while same and chosen[same - 1].role == "assistant":
        same -= 1
    prompt = chosen[:same]
    if not prompt or chosen[same].role != "assistant" or rejected[same].role != "assistant":
        refuse(
            row.field("rejected"),
            "must begin with the same prompt as chosen and answer it",
            [m.text for m in rejected[: same + 1]],
        )
    return _agreed(row, given, prompt, "chosen and rejected begin"), chosen[same:], rejected[same:]


def _agreed(
    row: Row, given: tuple[Message, ...] | None, found: tuple[Message, ...], who: str
) -> tuple[Message, ...]:
    """The prompt that the answers repeat, which one in a column of its own must be the end of."""
    if given is None:
        row.notes["implicit prompt"] += 1
        return row.with_system(found)
    said = [m.text.strip() for m in given if m.role != "system"]
    if said and [m.text.strip() for m in found][-len(said) :] != said:
        refuse(row.field(_column(row, PROMPT)), f"must be what {who} with", said[-1])
    if given[0].role != "system":
        return found
    if found[0].role != "system":
        return (given[0], *found)
    if given[0].text.strip() != found[0].text.strip():
        refuse(row.field(_column(row, PROMPT)), f"must be what {who} with", given[0].text)
    return found


def _item_answer(item: Any, where: str) -> tuple[Message, ...]:
    if isinstance(item, Mapping) and "role" not in item:
        key = next((k for k in _ITEM_TEXT if present(item.get(k))), None)
        if key is None:
            refuse(where, f"must hold its text under one of {', '.join(_ITEM_TEXT)}", item)
        return _answer(item[key], f"{where}.{key}")
    return _answer(item, where)


def _item_scores(row: Row, items: Sequence[Any], where: str) -> tuple[list[float] | None, bool]:
    """(one number a completion, is lower better?); None where the file gives only an order."""
    for names, lower in ((RANKS, True), (SCORES, False)):
        found = row.find(*names)
        if found is not None:
            numbers = [number(x, f"{found[1]}[{i}]") for i, x in enumerate(list_of(*found))]
            if len(numbers) != len(items):
                refuse(
                    found[1],
                    f"must hold one number for each of the {len(items)} completions",
                    f"{len(numbers)} numbers",
                )
            return numbers, lower
    if not items_are_ranked(row.values):
        return None, False
    key = next(k for k in ("rank", *_ITEM_SCORE) if present(items[0].get(k)))
    return [number(x.get(key), f"{where}[{i}].{key}") for i, x in enumerate(items)], key == "rank"


def _step_label(value: Any, where: str) -> float:
    """True or false, or a probability."""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return float(value.strip().lower() == "true")
    label = number(value, where)
    if not 0 <= label <= 1:
        refuse(where, "must be true or false, or a probability between 0 and 1", value)
    return label
