"""One update: what may enter the gradient, what ratio 1 means, and that no cut of the batch matters."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from spine import DIGIT_SYMBOLS, alone, gradients, random_samples, sample, tiny_policy

from stepladder.algorithms import ALGORITHMS, Algorithm
from stepladder.data.batching import pack
from stepladder.data.chat.renderer import Renderer
from stepladder.engines.local.engine import LocalEngine
from stepladder.environments.environment import as_world
from stepladder.errors import ConfigError, InvariantError
from stepladder.play.policy_agent import policy_agents
from stepladder.play.rollout import Limits, rollout
from stepladder.policies.optimizer import MasterOptimizer
from stepladder.policies.policy import Policy
from stepladder.rungs.rl.credit import make_batch
from stepladder.rungs.rl.update import RlBatch, UpdateRules, check_on_policy, reference_kl, rl_update
from stepladder.rungs.supervised import sft_update, validation_loss
from stepladder.types import Group, Message, Reset, Step, Task, TrainingSample

GRPO = dataclasses.replace(ALGORITHMS["grpo"], kl_in="none", kl_coefficient=0.0)


class Echo:
    """Three turns; each answer gets a long reply. Worth how many zeros were said, so that siblings differ."""

    inline = True
    tasks = staticmethod(lambda split: [{"prompt": f"{i}?"} for i in range(5)])

    async def reset(self, task: Task, *, seed: int) -> Reset:
        self.turn, self.said = 0, ""
        return Reset(task.messages)

    async def step(self, message: Message) -> Step:
        self.turn += 1
        self.said += message.text
        reply = () if self.turn == 3 else (Message("user", f"S{self.turn}?01234"),)
        return Step(reply, reward=float(message.text.count("0")), terminated=self.turn == 3)


class Setting:
    """A tiny policy, an engine on its weights, and groups played with them."""

    def __init__(self, *, mode: str | None = None) -> None:
        # Small random weights: each of 15 tokens is likely, the end of a turn too.
        self.policy = tiny_policy(symbols=DIGIT_SYMBOLS, mode=mode, scale=0.05)  # type: ignore[arg-type]
        self.engine = LocalEngine(self.policy.model, max_context=128, exact=True)
        self.optimizer = MasterOptimizer(self.policy.trainable())

    def play(self, *, temperature: float = 1.0, seed: int = 0) -> list[Group]:
        world = as_world(Echo)
        agents = policy_agents(
            self.engine,
            Renderer(self.policy.tokenizer),
            temperature=temperature,
            max_tokens=24,
            max_context=128,
        )
        tasks = [(f"g{i}", world.get("train", i)) for i in range(3)]
        return asyncio.run(rollout(agents, world, tasks, group_size=4, limits=Limits(max_turns=3), seed=seed))

    def update(self, batch: RlBatch, row: Algorithm = GRPO, **settings: Any) -> dict[str, float]:
        outer = {k: settings.pop(k) for k in ("reference", "before_step", "also") if k in settings}
        rules = UpdateRules(row=row, **{"constant": 72.0, **settings})
        return rl_update(self.policy, self.optimizer, batch, rules, learning_rate=1e-2, **outer)


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    asyncio.run(made.engine.close())


class Watching(MasterOptimizer):
    """Keeps the gradients of a step instead of taking it."""

    def step(self, lr: float) -> float:
        self.seen = {name: t.grad.clone() for name, t in self.masters.items() if t.grad is not None}
        self.clear()
        return 0.0


def exact(metrics: dict[str, float]) -> None:
    check_on_policy(metrics, exact_limit=1e-4, mean_limit=0.25)


# Gradients by two orders of summation. Forward and backward are some 24 matrix products in a row: two layers
# of five and the head, once forward and about once backward. Each has at most 48 terms, each of them rounded
# to half of 2^-23.
FLOAT_NOISE = 24 * 48 * 2.0**-24


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], within: float) -> None:
    """Equal within `within` of the largest entry of each tensor (of 1 where that is less)."""
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, float(b[name].abs().max()))
        assert float((a[name] - b[name]).abs().max()) <= within * scale, name


# -- what is played ----------------------------------------------------------------------------------------


def test_what_is_trained_is_what_was_sampled(setting: Setting) -> None:
    """Several turns; the mask is True on the sampled ids alone, each stop token included (fault 20)."""
    for group in setting.play():
        for t in group.trajectories:
            assert t.failure is None
            (s,) = t.samples
            sampled = [i for turn in t.turns for i in turn.token_ids]
            assert [i for i, m in zip(s.token_ids, s.mask, strict=True) if m] == sampled
            behaviour = [p for turn in t.turns for p in turn.logprobs]
            assert [p for p, m in zip(s.behaviour_logprobs, s.mask, strict=True) if m] == behaviour
            for turn in t.turns:
                if turn.finish_reason == "stop":
                    assert turn.token_ids[-1] in turn.sampling.stop_token_ids
    assert sum(len(t.turns) for t in group.trajectories) > 4


# -- ratio 1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_current_over_behaviour_is_one_at_the_first_update(setting: Setting, temperature: float) -> None:
    batch = make_batch(setting.play(temperature=temperature), GRPO)
    metrics = setting.update(batch, temperature=temperature, before_step=exact)
    assert metrics["updated"] == 1.0
    assert metrics["log_ratio_abs_max"] < 1e-4
    assert metrics["tokens"] > 50


def refused(setting: Setting, batch: RlBatch, **settings: Any) -> None:
    before = {name: p.detach().clone() for name, p in setting.policy.trainable().items()}
    with pytest.raises(InvariantError, match="not those of the model being"):
        setting.update(batch, before_step=exact, **settings)
    for name, p in setting.policy.trainable().items():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_a_weight_sync_that_did_not_arrive_is_seen(setting: Setting) -> None:
    setting.update(make_batch(setting.play(), GRPO))
    stale = make_batch(setting.play(seed=1), GRPO)
    refused(setting, stale)
    setting.engine.sync(1)
    setting.update(make_batch(setting.play(seed=1), GRPO), before_step=exact)


def test_a_temperature_on_one_side_only_is_seen(setting: Setting) -> None:
    refused(setting, make_batch(setting.play(temperature=0.7), GRPO))


def test_a_mask_shifted_by_one_is_seen(setting: Setting) -> None:
    batch = make_batch(setting.play(), GRPO)
    batch.samples = [
        dataclasses.replace(
            s,
            mask=(False, *s.mask[:-1]),
            behaviour_logprobs=(0.0, *s.behaviour_logprobs[:-1]),
            turn_ids=(-1, *s.turn_ids[:-1]),
        )
        for s in batch.samples
    ]
    refused(setting, batch)


def test_a_behaviour_that_is_no_number_is_seen() -> None:
    with pytest.raises(InvariantError):
        check_on_policy({"log_ratio_abs_max": float("nan")}, exact_limit=1e-4, mean_limit=0.25)
    with pytest.raises(InvariantError):
        check_on_policy({"log_ratio_abs": float("nan")}, exact_limit=None, mean_limit=0.25)


def test_another_precision_is_judged_by_its_mean() -> None:
    check_on_policy({"log_ratio_abs": 0.03, "log_ratio_abs_max": 2.0}, exact_limit=None, mean_limit=0.25)
    with pytest.raises(InvariantError, match=r"0\.25 on average"):
        check_on_policy({"log_ratio_abs": 0.3, "log_ratio_abs_max": 0.4}, exact_limit=None, mean_limit=0.25)


# -- what may enter the gradient ---------------------------------------------------------------------------


def _garble(policy: Policy, samples: Sequence[TrainingSample]) -> torch.utils.hooks.RemovableHandle:
    """From now on the model says something else wherever the next token was not sampled by the policy."""
    if policy.mode == "packed":
        packed = pack(samples, scored_only=True)
        keep = torch.zeros(1, packed.num_tokens, dtype=torch.bool)
        keep[0, torch.from_numpy(packed.sources)] = True
    else:
        keep = torch.zeros(len(samples), max(len(s.token_ids) for s in samples), dtype=torch.bool)
        for b, s in enumerate(samples):
            keep[b, : len(s.mask) - 1] = torch.tensor(s.mask[1:])
    assert not keep.all()

    def hook(module: Any, args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        filled = hidden.shape[1] - keep.shape[1]  # a packed row may end in filling, which nothing reads
        kept = torch.nn.functional.pad(keep, (0, filled))
        output.last_hidden_state = torch.where(kept[..., None], hidden, hidden * -37.5 + 11.0)
        return output

    return policy._body().register_forward_hook(hook)


@pytest.mark.parametrize("mode", ["packed", "padded", "full"])
def test_logits_of_environment_tokens_do_not_touch_the_gradient(mode: str) -> None:
    """Fault 21: replacing what the model says about every prompt, tool and glue token changes no bit."""
    setting = Setting(mode=mode)
    batch = make_batch(setting.play(), GRPO)
    live = [i for i in range(len(batch.samples)) if batch.advantages[i] != 0]
    seen = []
    for garbled in (False, True):
        batch.proximal.clear()
        optimizer = Watching(setting.policy.trainable())
        handle = _garble(setting.policy, [batch.samples[i] for i in live]) if garbled else None
        setting.optimizer = optimizer
        metrics = setting.update(batch)
        seen.append((optimizer.seen, metrics))
        if handle is not None:
            handle.remove()
    (before, first), (after, second) = seen
    assert any(g.abs().sum() > 0 for g in before.values())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert first == second
    asyncio.run(setting.engine.close())


def test_stored_numbers_of_environment_tokens_do_not_touch_the_gradient(setting: Setting) -> None:
    batch = make_batch(setting.play(), GRPO)
    setting.optimizer = Watching(setting.policy.trainable())
    setting.update(batch, correction="token_cap")
    before = setting.optimizer.seen
    other = dataclasses.replace(batch, proximal={}, reference={})
    other.samples = [
        dataclasses.replace(
            s,
            behaviour_logprobs=tuple(
                p if m else -1e30 for p, m in zip(s.behaviour_logprobs, s.mask, strict=True)
            ),
        )
        for s in batch.samples
    ]
    setting.update(other, correction="token_cap")
    assert all(torch.equal(before[name], setting.optimizer.seen[name]) for name in before)


@pytest.mark.parametrize(("correction", "weight"), [("token_mask", 0.0), ("token_cap", math.exp(-2.5))])
def test_tokens_that_their_sampler_found_likelier_by_far(
    setting: Setting, correction: str, weight: float
) -> None:
    """All sampled at log-probabilities 2.5 above the policy's: w = e^-2.5 = .082, outside .5 to 2."""
    batch = make_batch(setting.play(), GRPO)
    batch.samples = [
        dataclasses.replace(s, behaviour_logprobs=tuple(p + 2.5 for p in s.behaviour_logprobs))
        for s in batch.samples
    ]
    metrics = setting.update(batch, correction=correction)
    assert metrics["correction_weight"] == pytest.approx(weight, rel=0.01)
    assert (metrics["grad_norm"] == 0.0) is (weight == 0.0)


def test_supervised_training_ignores_what_others_said(policy: Policy) -> None:
    """Prompt and tool output carry no loss: the gradient is that of the trained tokens alone."""
    optimizer = Watching(policy.trainable())
    one = sample([20, 21, 22, 23, 24, 25], 0, mask=[False, False, True, False, False, True])
    metrics = sft_update(policy, optimizer, [one], learning_rate=1.0, token_budget=99)
    (-alone(policy, one).sum() / 2).backward()
    close(optimizer.seen, gradients(policy), FLOAT_NOISE)
    assert metrics["tokens"] == 2.0
    with torch.no_grad():
        expected = -float(alone(policy, one).mean())
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert validation_loss(policy, [one], token_budget=99) == pytest.approx(expected, rel=1e-5)


# -- how the batch is cut ----------------------------------------------------------------------------------


def test_small_steps_in_bfloat16_teach_as_much_as_in_float32() -> None:
    """Half of the weights are above .2, where bfloat16 has a spacing of 2^-10 or more: five steps of 1e-4 are
    half of it. With masters that begin as copies of the weights, .31 of float32's .47 nats would be left."""

    def learned(dtype: torch.dtype) -> float:
        policy = tiny_policy(dtype=torch.bfloat16)
        policy = Policy(policy.model.to(dtype), policy.tokenizer)
        exact = copy.deepcopy(policy.model)
        samples = random_samples(12)
        optimizer = MasterOptimizer(policy.trainable())
        losses = []
        for _ in range(9):
            exact.load_state_dict(policy.model.state_dict())  # the rounded weights, computed with in float32
            scored = Policy(exact.float(), policy.tokenizer)
            losses.append(validation_loss(scored, samples, token_budget=999))
            sft_update(policy, optimizer, samples, learning_rate=1e-4, token_budget=999)
        return losses[0] - losses[-1]

    assert learned(torch.bfloat16) == pytest.approx(learned(torch.float32), rel=0.25)


def test_sft_of_one_and_nine_tokens_in_one_or_two_pieces(policy: Policy) -> None:
    """Fault 26: the mean over ten tokens, not the mean of two means."""
    short, long = sample([20, 21], 1, group="a"), sample(list(range(30, 40)), 1, group="b")
    optimizer = Watching(policy.trainable())
    seen, losses = [], []
    for budget in (100, 10):
        losses.append(sft_update(policy, optimizer, [short, long], learning_rate=1.0, token_budget=budget))
        seen.append(optimizer.seen)
    close(seen[0], seen[1], FLOAT_NOISE)
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["nll"] == pytest.approx(losses[1]["nll"], rel=1e-5)
    (-(alone(policy, short).sum() + alone(policy, long).sum()) / 10).backward()
    close(seen[0], gradients(policy), FLOAT_NOISE)


@pytest.mark.parametrize("name", ["reinforce", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_rl_in_one_or_many_pieces(setting: Setting, name: str) -> None:
    row = dataclasses.replace(ALGORITHMS[name], kl_in="none", kl_coefficient=0.0)
    batch = make_batch(setting.play(), row)
    setting.optimizer = Watching(setting.policy.trainable())
    whole = setting.update(batch, row)
    together, batch.proximal = setting.optimizer.seen, {}
    pieces = setting.update(batch, row, token_budget=20)
    assert pieces["tokens_computed"] > whole["tokens_computed"]  # it was cut
    close(together, setting.optimizer.seen, FLOAT_NOISE)
    for key in ("loss", "entropy", "log_ratio_abs_max", "tokens", "ratio"):
        assert pieces[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-6), key


def test_order_of_samples_does_not_matter(setting: Setting) -> None:
    batch = make_batch(setting.play(), GRPO)
    setting.optimizer = Watching(setting.policy.trainable())
    setting.update(batch)
    before = setting.optimizer.seen
    order = torch.randperm(len(batch.samples), generator=torch.Generator().manual_seed(0))
    turned = RlBatch(
        [batch.samples[i] for i in order],
        batch.advantages[order],
        batch.trajectory_index[order],
        batch.group_index[order],
    )
    setting.update(turned)
    close(before, setting.optimizer.seen, FLOAT_NOISE)


# -- groups without a signal -------------------------------------------------------------------------------


def rewarded(group: Group, *values: float | None) -> Group:
    """The group with other scores."""
    from stepladder.types import Score

    pairs = zip(group.trajectories, values, strict=True)
    return dataclasses.replace(group, trajectories=tuple(t.with_score(Score(v)) for t, v in pairs))


def test_equal_rewards_move_nothing(setting: Setting) -> None:
    """Also where their mean is not exact in floats: .1 four times."""
    groups = [rewarded(g, 0.1, 0.1, 0.1, 0.1) for g in setting.play()]
    batch = make_batch(groups, GRPO)
    assert len(batch.samples) == 12
    assert not batch.advantages.any()
    before = {n: p.detach().clone() for n, p in setting.policy.trainable().items()}
    assert setting.update(batch)["updated"] == 0.0
    assert all(torch.equal(p, before[n]) for n, p in setting.policy.trainable().items())


def test_a_group_without_a_signal_stays_in_the_denominator(setting: Setting) -> None:
    """Fault 31, a documented choice: with sequence_mean over 8 episodes instead of 4 the step is halved."""
    first, second, _ = setting.play()
    live, dead = rewarded(first, 1.0, 0.0, 0.0, 1.0), rewarded(second, 0.5, 0.5, 0.5, 0.5)
    setting.optimizer = Watching(setting.policy.trainable())
    setting.update(make_batch([live], GRPO))
    alone_ = setting.optimizer.seen
    setting.update(make_batch([live, dead], GRPO))
    close({n: g / 2 for n, g in alone_.items()}, setting.optimizer.seen, FLOAT_NOISE)


def test_what_has_no_signal_and_what_has_no_weight_is_not_computed(setting: Setting) -> None:
    """Counted: a dead group adds no token to the work of the live one, nor does a tail nobody trains."""
    first, second, _ = setting.play()
    live, dead = rewarded(first, 1.0, 0.0, 0.0, 1.0), rewarded(second, 0.5, 0.5, 0.5, 0.5)
    one = make_batch([live], GRPO)
    wanted = setting.update(one)["tokens_computed"]
    longest = max(len(s.token_ids) for s in one.samples)
    assert 0 < wanted < sum(len(s.token_ids) for s in one.samples)
    assert setting.update(make_batch([live, dead], GRPO))["tokens_computed"] == wanted
    tailed = make_batch([live, dead], GRPO)
    tailed.samples = [
        dataclasses.replace(
            s,
            token_ids=(*s.token_ids, *(9,) * longest),
            mask=(*s.mask, *(False,) * longest),
            behaviour_logprobs=(*s.behaviour_logprobs, *(0.0,) * longest),
            turn_ids=(*s.turn_ids, *(-1,) * longest),
        )
        for s in tailed.samples
    ]
    assert setting.update(tailed)["tokens_computed"] == wanted


def test_ratio_one_is_measured_even_when_nothing_is_learned(setting: Setting) -> None:
    batch = make_batch([rewarded(g, 0.0, 0.0, 0.0, 0.0) for g in setting.play()], GRPO)
    assert setting.update(batch, before_step=exact)["log_ratio_abs_max"] < 1e-4
    refused(setting, batch, temperature=0.5)


# -- reference and reuse -----------------------------------------------------------------------------------


def test_the_kl_term_by_hand(setting: Setting) -> None:
    """No advantage, so the loss is beta * k3 alone, k3 = exp(ref - lp) - (ref - lp) - 1, sequence_mean."""
    row = dataclasses.replace(ALGORITHMS["grpo"], kl_coefficient=0.5)
    reference = tiny_policy(symbols=DIGIT_SYMBOLS, seed=1, scale=0.05)
    groups = [rewarded(g, 1.0, 1.0, 1.0, 1.0) for g in setting.play()]
    batch = make_batch(groups, row)
    setting.optimizer = Watching(setting.policy.trainable())
    metrics = setting.update(batch, row, reference=reference, token_budget=60)
    loss = torch.zeros(())
    for s in batch.samples:
        with torch.no_grad():
            anchor = alone(reference, s)
        difference = anchor - alone(setting.policy, s)
        loss = loss + 0.5 * (difference.exp() - difference - 1).mean() / len(batch.samples)
    loss.backward()
    close(setting.optimizer.seen, gradients(setting.policy), FLOAT_NOISE)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["updated"] == 1.0


def test_a_reference_equal_to_the_policy_pulls_nowhere(setting: Setting) -> None:
    row = dataclasses.replace(ALGORITHMS["grpo"], kl_coefficient=0.5)
    twin = tiny_policy(symbols=DIGIT_SYMBOLS, scale=0.05)
    batch = make_batch([rewarded(g, 1.0, 1.0, 1.0, 1.0) for g in setting.play()], row)
    setting.optimizer = Watching(setting.policy.trainable())
    metrics = setting.update(batch, row, reference=twin)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert all(float(g.abs().max()) < 1e-6 for g in setting.optimizer.seen.values())


def test_a_kl_term_without_a_reference_is_refused(setting: Setting) -> None:
    with pytest.raises(ValueError, match="give the reference policy"):
        setting.update(make_batch(setting.play(), GRPO), ALGORITHMS["grpo"])


def test_a_second_update_of_a_batch_is_measured_from_the_first(setting: Setting) -> None:
    """Proximal stays; the ratio is the second policy's over it, and the clips are counted."""
    batch = make_batch(setting.play(), GRPO)
    first = setting.update(batch)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert first["clip_low"] == first["clip_high"] == 0.0
    proximal = {i: t.clone() for i, t in batch.proximal.items()}
    second = setting.update(batch)
    assert all(torch.equal(batch.proximal[i], proximal[i]) for i in proximal)
    live = [i for i in proximal if batch.advantages[i] != 0]
    with torch.no_grad():
        third = setting.policy.logprobs([batch.samples[i] for i in live])
    assert second["clip_low"] + second["clip_high"] > 0.0
    assert second["approx_kl"] > 0.0
    moved = [third.logprobs[b, : len(proximal[i])] - proximal[i] for b, i in enumerate(live)]
    assert max(float(m.abs().max()) for m in moved) > 1e-3


@pytest.mark.model
def test_current_over_behaviour_is_one_for_the_real_model(real_policy: Policy) -> None:
    """Sampled in turns with shared prefixes and a cache, scored as one packed row: fp32 on both sides."""
    from stepladder.environments.environment import load_world
    from stepladder.rungs.rl.update import behaviour_logprobs

    world = load_world("calculator")
    renderer = Renderer(real_policy.tokenizer)
    engine = LocalEngine(real_policy.model, max_context=512, exact=True)
    agents = policy_agents(engine, renderer, temperature=1.0, max_tokens=24, max_context=512)
    tasks = [(f"g{i}", world.get("train", i)) for i in range(2)]
    groups = asyncio.run(rollout(agents, world, tasks, group_size=3, limits=Limits(max_turns=2), seed=0))
    samples = [s for g in groups for t in g.trajectories for s in t.samples]
    with torch.no_grad():
        scores = real_policy.logprobs(samples)
    difference = (scores.logprobs - behaviour_logprobs(samples, scores)).abs()
    assert int(scores.mask.sum()) > 60
    assert float(difference.max()) < 1e-4, float(difference.max())
    asyncio.run(engine.close())


# -- what else may be in a loss ------------------------------------------------------------------------------


def test_the_entropy_bonus_by_hand(setting: Setting) -> None:
    """No advantage: the loss is -c times the mean entropy of the trained tokens, gradient included."""
    row = dataclasses.replace(GRPO, aggregation="token_mean")
    batch = make_batch([rewarded(g, 1.0, 1.0, 1.0, 1.0) for g in setting.play()], row)
    setting.optimizer = Watching(setting.policy.trainable())
    metrics = setting.update(batch, row, entropy_coefficient=0.3, token_budget=60)
    total, count = torch.zeros(()), 0
    for s in batch.samples:
        ids = torch.tensor(s.token_ids)
        table = setting.policy.lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        at = torch.tensor(s.mask[1:])
        total = total - (table.exp() * table).sum(-1)[at].sum()
        count += int(at.sum())
    (-0.3 * total / count).backward()
    close(setting.optimizer.seen, gradients(setting.policy), FLOAT_NOISE)
    entropy = float(total.detach()) / count
    assert metrics["loss"] == pytest.approx(-0.3 * entropy, rel=1e-4)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-4)


def test_a_loss_of_ones_own_takes_the_place_of_the_surrogate(setting: Setting) -> None:
    """The same formula gives the same gradient; it is given the numbers of the row that it names."""
    from stepladder.objectives.policy_gradient import clipped_surrogate

    seen: list[float | None] = []

    def own(logprobs: Any, proximal: Any, advantages: Any, mask: Any, *, clip_high: float | None) -> Any:
        seen.append(clip_high)
        losses, _ = clipped_surrogate(logprobs, proximal, advantages, mask)
        return losses, {"mine": losses.mean()}

    batch = make_batch(setting.play(), GRPO)
    setting.optimizer = Watching(setting.policy.trainable())
    setting.update(batch)
    before = setting.optimizer.seen
    metrics = setting.update(batch, loss=own)
    close(before, setting.optimizer.seen, 1e-7)
    assert seen == [0.2]
    assert "mine" in metrics

    with pytest.raises(ConfigError, match=r"one for each token"):
        setting.update(batch, loss=lambda *a: (torch.zeros(3), {}))


def test_advantages_by_token_weigh_their_own_tokens(setting: Setting) -> None:
    """The same number on every token is the same as one number for the row; cut in pieces too."""
    batch = make_batch(setting.play(), GRPO)
    setting.optimizer = Watching(setting.policy.trainable())
    setting.update(batch)
    before = setting.optimizer.seen
    width = max(len(s.token_ids) for s in batch.samples)
    spread = dataclasses.replace(batch, advantages=batch.advantages[:, None].expand(-1, width).clone())
    for budget in (4096, 30):
        setting.update(spread, token_budget=budget)
        close(before, setting.optimizer.seen, FLOAT_NOISE)


def test_the_kl_of_a_reward_is_behaviour_less_reference(setting: Setting) -> None:
    reference = tiny_policy(symbols=DIGIT_SYMBOLS, seed=1, scale=0.05)
    batch = make_batch(setting.play(), GRPO)
    kl = reference_kl(batch, reference, temperature=1.0, token_budget=40)
    for i, s in enumerate(batch.samples):
        with torch.no_grad():
            anchor = alone(reference, s)
        trained = torch.tensor(s.mask)
        behaviour = torch.tensor(s.behaviour_logprobs)[trained]
        assert torch.allclose(kl[i, : len(s.mask)][trained], behaviour - anchor, atol=1e-5)
        assert not kl[i, : len(s.mask)][~trained].any()
