"""Scores and values do not depend on how a batch is laid out, and read the position they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spine import random_samples, sample, tiny_policy

from stepladder.errors import DataError
from stepladder.policies.heads import HeadedModel, ScalarHead, ScoredModel, ValueModel
from stepladder.policies.policy import Mode, Policy

MODES: tuple[Mode, ...] = ("packed", "padded", "full")


def scored(arch: str = "llama", mode: Mode | None = None, *, seed: int = 0) -> ScoredModel:
    policy = tiny_policy(arch, mode=mode)  # type: ignore[arg-type]
    return ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3, seed=seed))


def alone(model: HeadedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """The head on the model's own hidden states of one sequence: no packing, no padding, no cache."""
    body = getattr(model.policy.lm, model.policy.lm.base_model_prefix)
    hidden = body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return (hidden.float() @ model.score.weight[0]).detach()


@pytest.mark.parametrize(
    ("arch", "mode"),
    [(a, m) for a in ("llama", "qwen3", "gpt2") for m in MODES] + [("gemma3", "padded"), ("gemma3", "full")],
)
def test_every_layout_gives_the_scores_of_each_sample_alone(arch: str, mode: Mode) -> None:
    model, samples = scored(arch, mode), random_samples(6)
    wanted = torch.stack([alone(model, s.token_ids)[-1] for s in samples])
    assert wanted.std() > 0.1, "equal scores would prove nothing"
    torch.testing.assert_close(model.sequence_scores(samples).detach(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_value_is_read_just_before_its_token(mode: Mode) -> None:
    policy = tiny_policy(mode=mode)
    model = ValueModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))
    samples = random_samples(5)
    got = model.token_values(samples).detach()
    for b, one in enumerate(samples):
        states = alone(model, one.token_ids)
        for t in range(got.shape[1]):
            wanted = states[t - 1] if t < len(one.mask) and one.mask[t] else torch.tensor(0.0)
            torch.testing.assert_close(got[b, t], wanted, rtol=1e-5, atol=1e-5)


def test_a_value_does_not_depend_on_the_token_it_is_a_baseline_for() -> None:
    policy = tiny_policy()
    model = ValueModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))
    one, other = sample((9, 10, 11, 12), 2), sample((9, 10, 11, 13), 2)
    assert torch.equal(model.token_values([one])[0, 3], model.token_values([other])[0, 3])
    assert not torch.equal(model.at([one], [[3]])[0], model.at([other], [[3]])[0])


@given(st.permutations(range(6)), st.integers(0, 5), st.sampled_from(MODES))
@settings(max_examples=25, deadline=None)
def test_fault_25_order_and_company_change_no_score(order: list[int], cut: int, mode: Mode) -> None:
    samples = random_samples(6)
    whole = MODELS[mode].sequence_scores(samples).detach()
    parts = [[samples[i] for i in order[:cut]], [samples[i] for i in order[cut:]]]
    got = torch.cat([MODELS[mode].sequence_scores(part).detach() for part in parts if part])
    torch.testing.assert_close(got, whole[list(order)], rtol=1e-5, atol=1e-5)


MODELS = {mode: scored(mode=mode) for mode in MODES}


def test_gradients_are_those_of_the_samples_one_by_one() -> None:
    """Packed with shared prefixes, a state that three samples share gets the sum of their gradients."""
    samples, weights = random_samples(6), torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25])
    found = []
    for mode in MODES:
        model = scored(mode=mode)
        (model.sequence_scores(samples) * weights).sum().backward()
        found.append({name: p.grad for name, p in model.trainable().items() if p.grad is not None})
    single = scored(mode="full")
    for one, weight in zip(samples, weights):
        (single.sequence_scores([one])[0] * weight).backward()
    wanted = {name: p.grad for name, p in single.trainable().items() if p.grad is not None}
    assert "score.weight" in wanted
    assert len(wanted) > 10
    for gradients in found:
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


def test_a_new_head_is_worth_zero_and_can_learn() -> None:
    model = ScoredModel(tiny_policy())
    scores = model.sequence_scores(random_samples(3))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.zeros(3))
    scores[0].backward()
    assert model.score.weight.grad is not None
    assert model.score.weight.grad.norm() > 0


def test_a_shared_trunk_is_the_policys_and_an_own_one_is_not() -> None:
    policy = tiny_policy()
    shared, own = ValueModel(policy), ValueModel.own_trunk(policy)
    name, theirs = next(iter(policy.trainable().items()))
    assert dict(shared.named_parameters())[f"model.{name}"] is theirs
    copied = dict(own.named_parameters())[f"model.{name}"]
    assert copied is not theirs
    assert torch.equal(copied, theirs)
    assert own.policy.mode == policy.mode


def test_the_head_stays_float32_on_a_bf16_body() -> None:
    policy: Policy = tiny_policy(dtype=torch.bfloat16, mode="padded")
    model = ScoredModel(policy, head=ScalarHead(policy.hidden_size, scale=0.3))
    assert model.score.weight.dtype == torch.float32
    assert model.sequence_scores(random_samples(2)).dtype == torch.float32


def test_a_sample_without_tokens_and_a_position_outside_are_named() -> None:
    model = scored()
    with pytest.raises(DataError, match="sample 1 has no tokens"):
        model.sequence_scores([sample((9, 10), 1), sample((), 0)])
    with pytest.raises(IndexError, match="position 2 is outside sample 0, whose positions are 0 to 1"):
        model.at([sample((9, 10), 1)], [[2]])
