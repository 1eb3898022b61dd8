"""Records as tokens: masks, budgets and counts. Faults 10, 11, 14, 17, 19, 67, 69, 70."""

from __future__ import annotations

from typing import Any

import pytest
from chat_tokenizers import CHATML, bpe_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from stepladder.data.batching import pack
from stepladder.data.budget import Budget, Dropped, Tally
from stepladder.data.chat.plain_text import PlainText
from stepladder.data.chat.renderer import Renderer
from stepladder.data.chat.tiny_tokenizer import HIDDEN_DIGIT, tiny_tokenizer
from stepladder.data.files.records import Preference, Ranking, Steps, Unpaired
from stepladder.data.samples import (
    completion_samples,
    preference_samples,
    ranking_samples,
    step_samples,
    text_samples,
    unpaired_samples,
)
from stepladder.errors import ConfigError, DataError, TemplateError
from stepladder.types import Message, TrainingSample

MARKS = ("<|im_start|>", "<|im_end|>")
RENDERER = Renderer(bpe_tokenizer(CHATML, MARKS, eos="<|im_end|>"))
TINY = Renderer(tiny_tokenizer(*HIDDEN_DIGIT))


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def said(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


def one(prompt: Any, completion: Any, budget: Budget = Budget(), renderer: Any = RENDERER) -> Any:
    return completion_samples(renderer, prompt, completion, trajectory_id="t", group_id="g", budget=budget)


def halves(sample: TrainingSample, renderer: Any = RENDERER) -> tuple[str, str]:
    """(prompt, completion) as text."""
    n = sample.mask.index(True)
    return renderer.decode(sample.token_ids[:n]), renderer.decode(sample.token_ids[n:])


# -- what is trained --------------------------------------------------------------------------------------


def test_fault_17_19_the_completion_and_its_terminator_are_trained_and_nothing_else() -> None:
    """<|user|>?<|end|><|assistant|> is [1, 4, 19, 7, 5]; the completion S<|end|> is [18, 7]."""
    sample = one(user("?"), said("S"), renderer=TINY)
    assert sample.token_ids == (1, 4, 19, 7, 5, 18, 7)
    assert sample.mask == (False,) * 5 + (True, True)
    assert sample == TINY.demonstration([*user("?"), *said("S")], trajectory_id="t", group_id="g")[0]


def test_fault_21_assistant_turns_of_the_prompt_are_context() -> None:
    history = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    sample = one(history, said("d"))
    assert halves(sample)[1] == "d<|im_end|>"
    assert sum(sample.mask) == len(sample.mask) - sample.mask.index(True)
    several = [Message("assistant", "d"), Message("tool", "e"), Message("assistant", "f")]
    sample = one(history, several)
    trained = [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
    assert RENDERER.decode(trained) == "d<|im_end|>f<|im_end|>"


def test_train_completion_covers_everything_after_the_prompt() -> None:
    messages = [Message("user", "a"), *said("b"), *user("c"), *said("d"), Message("tool", "e"), *said("f")]

    def trained(train: Any) -> str:
        (sample,) = RENDERER.demonstration(messages, trajectory_id="t", train=train, answers_from=3)
        return RENDERER.decode([t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m])

    assert trained("assistant") == "d<|im_end|>f<|im_end|>"
    assert trained("last_turn") == "f<|im_end|>"
    tool = "\n<|im_start|>user\n<tool_response>\ne\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert trained("completion") == f"d<|im_end|>{tool}f<|im_end|>"
    assert trained("full").startswith("user\na<|im_end|>")
    with pytest.raises(DataError, match='use train="assistant"'):
        RENDERER.demonstration(messages, trajectory_id="t", train="completion")


# -- pairs ------------------------------------------------------------------------------------------------


def pair(prompt: str, chosen: str, rejected: str, budget: Budget = Budget()) -> Any:
    record = Preference(user(prompt), said(chosen), said(rejected))
    return preference_samples(RENDERER, record, group_id="g", budget=budget)


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@settings(deadline=None, max_examples=60)
@given(TEXT, TEXT, TEXT)
def test_fault_69_the_prompt_is_the_same_on_both_sides_whatever_follows_it(
    prompt: str, chosen: str, rejected: str
) -> None:
    samples = pair(prompt, chosen, rejected)
    if isinstance(samples, Dropped):
        assert chosen.strip() == rejected.strip()
        return
    n = RENDERER.start(user(prompt)).num_tokens
    assert [s.mask.index(True) for s in samples] == [n, n]
    assert samples[0].token_ids[:n] == samples[1].token_ids[:n]


def test_fault_69_a_prompt_that_ends_with_a_space_does_not_merge_with_what_follows() -> None:
    """ "the" and " the" are tokens of this vocabulary, so "Say " + "the" tempts a merge over the boundary."""
    encode = RENDERER.tokenizer.encode
    assert encode("Say the") != encode("Say ") + encode("the")
    for answer in ("the", "46", " the"):
        sample = one("Say ", answer)
        n = sample.mask.index(True)
        assert sample.token_ids[:n] == tuple(RENDERER.raw_prompt("Say "))
        assert halves(sample) == ("Say ", f"{answer}<|im_end|>")


def test_a_pair_is_one_group_and_its_prompt_is_computed_once() -> None:
    chosen, rejected = pair("What is 2 + 2?", "four", "five")
    assert (chosen.group_id, rejected.group_id) == ("g", "g")
    assert (chosen.trajectory_id, rejected.trajectory_id) == ("g/chosen", "g/rejected")
    n = chosen.mask.index(True)
    packed = pack([chosen, rejected])
    shared = n + 1 if chosen.token_ids[n] == rejected.token_ids[n] else n  # "f" opens both
    assert packed.num_tokens == len(chosen.token_ids) + len(rejected.token_ids) - shared
    assert isinstance(pair("a", "same", "same"), Dropped)


# -- budgets ----------------------------------------------------------------------------------------------


def test_fault_67_each_side_has_its_own_budget_and_none_is_emptied() -> None:
    """Completions of 50 and 2 tokens, both at most 40: the short one stays whole, terminator included."""
    record = Preference(user("?"), said("S" * 49), said("1"))
    tally = Tally()
    budget = Budget(max_completion_tokens=40)
    chosen, rejected = preference_samples(TINY, record, group_id="g", budget=budget, tally=tally)  # type: ignore[misc]
    assert (chosen.num_trained, rejected.num_trained) == (40, 2)
    end = TINY.stop_token_ids[0]
    assert (chosen.token_ids[-1], rejected.token_ids[-1]) == (18, end)
    assert tally.text == "1 row: 1 kept, 1 completion cut, without a terminator (10 tokens lost)"
    dropped = Budget(max_completion_tokens=40, overlong="drop")
    assert preference_samples(TINY, record, group_id="g", budget=dropped, tally=tally) == Dropped(
        "over max_completion_tokens=40", "g/chosen", 50
    )
    assert tally.text.endswith("1 dropped (over max_completion_tokens=40: 1)")


def test_fault_70_every_option_changes_something() -> None:
    """<|user|> 0 1 2 3 4 <|end|> <|assistant|> behind a BOS: 9 tokens cut to 5, the frame kept.

    The frame is the BOS and <|assistant|>; <|end|> closes the question, so it goes with the text.
    """
    prompt, answer = user("01234"), said("S")
    whole = one(prompt, answer, renderer=TINY)
    assert whole.mask.index(True) == 9
    shown = {
        keep: halves(one(prompt, answer, Budget(max_prompt_tokens=5, keep=keep), TINY), TINY)
        for keep in ("end", "start")
    }
    bos = TINY.tokenizer.bos_token
    assert shown["end"] == (f"{bos}34<|end|><|assistant|>", "S<|end|>")
    assert shown["start"] == (f"{bos}<|user|>01<|assistant|>", "S<|end|>")
    assert isinstance(one(prompt, answer, Budget(5, overlong="drop"), TINY), Dropped)
    with pytest.raises(ConfigError, match=r"beside its frame of 2 tokens .*; give at least 3"):
        one(prompt, answer, Budget(max_prompt_tokens=2), TINY)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1; got 0"),
        ({"max_completion_tokens": -3}, "max_completion_tokens must be at least 1; got -3"),
        ({"keep": "start"}, "says how prompts are cut, but none is"),
        ({"keep": "start", "max_prompt_tokens": 5, "overlong": "drop"}, "none is"),
        ({"overlong": "drop"}, "drops nothing without a limit"),
    ],
)
def test_fault_70_an_option_that_would_change_nothing_is_refused(options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Budget(**options)


@settings(deadline=None, max_examples=80)
@given(
    st.text("?01234", min_size=1, max_size=30),
    st.text("S01234", max_size=30),
    st.none() | st.integers(3, 40),
    st.none() | st.integers(1, 40),
    st.sampled_from(["end", "start"]),
)
def test_truncation_keeps_its_promises(
    prompt: str, answer: str, prompt_limit: int | None, answer_limit: int | None, keep: Any
) -> None:
    """Each side is within its own budget, begins and ends where it should, and pays for itself only."""
    budget = Budget(prompt_limit, answer_limit, keep="end" if prompt_limit is None else keep)
    whole, cut = (one(user(prompt), said(answer), b, TINY) for b in (Budget(), budget))
    n, m = whole.mask.index(True), cut.mask.index(True)
    assert m == min(n, prompt_limit or n)
    assert cut.num_trained == min(whole.num_trained, answer_limit or whole.num_trained) > 0
    assert cut.token_ids[m:] == whole.token_ids[n : n + cut.num_trained]
    assert cut.token_ids[0] == whole.token_ids[0]  # BOS
    assert cut.token_ids[m - 1] == whole.token_ids[n - 1]  # <|assistant|>
    assert cut.token_ids.count(whole.token_ids[0]) == 1
    assert len(cut.mask) == len(cut.token_ids) == len(cut.turn_ids) == len(cut.behaviour_logprobs)
    assert cut.turn_ids == (-1,) * m + (0,) * cut.num_trained


def test_a_cut_completion_ends_with_a_trained_token() -> None:
    several = [Message("assistant", "SS"), Message("tool", "1234"), Message("assistant", "3")]
    whole = one(user("?"), several, renderer=TINY)
    assert [i for i, m in enumerate(whole.mask) if m][:3] == [5, 6, 7]
    cut = one(user("?"), several, Budget(max_completion_tokens=5), TINY)
    assert (cut.token_ids, cut.mask[-1]) == (whole.token_ids[:8], True)


def test_unpaired_and_ranked_completions() -> None:
    record = Unpaired(user("?"), said("S"), True)
    sample = unpaired_samples(TINY, record, group_id="g")
    assert isinstance(sample, TrainingSample)
    assert sample.token_ids == one(user("?"), said("S"), renderer=TINY).token_ids
    tally = Tally()
    ranked = Ranking(user("?"), (said("1"), said("2"), said("SSS")))
    samples = ranking_samples(TINY, ranked, group_id="g", tally=tally)
    assert isinstance(samples, tuple)
    assert [s.trajectory_id for s in samples] == ["g/0", "g/1", "g/2"]
    assert [halves(s, TINY)[1] for s in samples] == ["1<|end|>", "2<|end|>", "SSS<|end|>"]
    short = Budget(max_completion_tokens=3, overlong="drop")
    assert isinstance(ranking_samples(TINY, ranked, group_id="g", budget=short, tally=tally), Dropped)
    assert tally.text == "2 rows: 1 kept, 1 dropped (over max_completion_tokens=3: 1)"


# -- steps ------------------------------------------------------------------------------------------------


def test_the_last_token_of_each_step_is_known() -> None:
    record = Steps(user("What is 2 + 2?"), ("the search ", "is over", "the search"), (1.0, 0.5, 0.0))
    found = step_samples(RENDERER, record, group_id="g")
    assert not isinstance(found, Dropped)
    ids, n = found.sample.token_ids, found.sample.mask.index(True)
    cuts = [n, *(end + 1 for end in found.ends)]
    pieces = [RENDERER.decode(ids[a:b]) for a, b in zip(cuts, [*cuts[1:], len(ids)], strict=True)]
    assert pieces == ["the search\n", "is over\n", "the search", "<|im_end|>"]
    assert found.labels == (1.0, 0.5, 0.0)
    limit = found.ends[1] + 1 - n
    cut = step_samples(RENDERER, record, group_id="g", budget=Budget(max_completion_tokens=limit))
    assert not isinstance(cut, Dropped)
    assert (cut.ends, cut.labels) == (found.ends[:2], (1.0, 0.5))
    none = step_samples(RENDERER, record, group_id="g", budget=Budget(max_completion_tokens=1))
    assert none == Dropped("no step is whole within max_completion_tokens", "g", len(ids) - n)
    left = step_samples(RENDERER, record, group_id="g", budget=Budget(max_prompt_tokens=n - 2))
    assert not isinstance(left, Dropped)
    assert left.ends == tuple(end - 2 for end in found.ends)


# -- without a template -----------------------------------------------------------------------------------


def llama_like() -> Any:
    """A tokenizer that adds a BOS by itself and has no chat template."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = bpe_tokenizer("", eos="</s>", bos="<s>")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("prompt", ["What is", "<s>What is"])
def test_fault_10_11_a_raw_prompt_has_one_bos(prompt: str) -> None:
    plain = PlainText(llama_like())
    bos = plain.tokenizer.bos_token_id
    assert plain.tokenizer.encode("a")[0] == bos
    sample = one(prompt, " four", renderer=plain)
    assert (sample.token_ids[0], sample.token_ids.count(bos)) == (bos, 1)
    assert halves(sample, plain) == ("<s>What is", " four</s>")
    cut = one(prompt, " four", Budget(max_prompt_tokens=3), plain)
    assert (cut.token_ids[0], cut.mask.index(True)) == (bos, 3)
    assert one(user(prompt), said(" four"), renderer=plain) == sample
    (text,) = text_samples(plain, prompt, trajectory_id="t", group_id="g")
    assert text.token_ids.count(bos) == 1
    with pytest.raises(TemplateError, match=r"only one message of the user .* got the roles"):
        one([Message("system", "s"), *user("u")], said("a"), renderer=plain)


def test_fault_10_the_templates_own_bos_is_not_doubled() -> None:
    template = "{{ bos_token }}" + CHATML
    tokenizer = llama_like()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer)
    bos = tokenizer.bos_token_id
    record = Preference(user("a"), said("b"), said("c"))
    pairs = preference_samples(renderer, record, group_id="g")
    solution = step_samples(renderer, Steps(user("a"), ("b",)), group_id="g")
    assert not isinstance(pairs, Dropped)
    assert not isinstance(solution, Dropped)
    for sample in (*pairs, solution.sample, one(user("a"), said("b"), renderer=renderer)):
        assert (sample.token_ids[0], sample.token_ids.count(bos)) == (bos, 1)


def test_markers_in_raw_text_stay_text() -> None:
    sample = one("a<|im_end|>b", "c<|im_end|>")
    assert sample.token_ids.count(RENDERER.stop_token_ids[0]) == 1
    with pytest.raises(DataError, match="both be strings or both be messages"):
        one("a", said("b"))
    with pytest.raises(DataError, match="prompt is empty"):
        one("", "b")


def test_texts_are_split_and_every_token_is_trained_once() -> None:
    tally = Tally()
    (whole,) = text_samples(TINY, "01234S", trajectory_id="t", group_id="g", tally=tally)
    parts = text_samples(TINY, "01234S", trajectory_id="t", group_id="g", max_tokens=4, tally=tally)
    assert whole.mask == (False,) + (True,) * (len(whole.token_ids) - 1)
    assert all(len(part.token_ids) <= 4 for part in parts)
    again = [t for part in parts for t, m in zip(part.token_ids, part.mask, strict=True) if m]
    assert (whole.token_ids[0], *again) == whole.token_ids
    assert tally.text == "2 rows: 2 kept, 1 text split"
    with pytest.raises(DataError, match="give at least 2"):
        text_samples(TINY, "0", trajectory_id="t", group_id="g", max_tokens=1)
