"""Each alarm on runs written by hand: what raises it, what must not, and that its memory can be saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.diagnostics.alarm import Alarm, Change, Detector, Smoothed
from stepladder.diagnostics.echo_trap import EchoTrap
from stepladder.diagnostics.entropy_collapse import EntropyCollapse
from stepladder.diagnostics.gradient_spike import GradientSpike
from stepladder.diagnostics.input_agnostic import TemplateCollapse
from stepladder.diagnostics.length import LengthExplosion
from stepladder.diagnostics.monitor import Monitor, default_alarms

Run = list[dict[str, float]]


def healthy(step: int) -> dict[str, float]:
    """A run that learns and converges: the spread rises and falls because groups get solved."""
    p = min(0.99, 0.1 + 0.03 * step)
    return {
        "reward": p,
        "success": p,
        "open_groups": 1 - p**8,
        "unsolved_groups": (1 - p) ** 8,
        "reward_std": (p * (1 - p)) ** 0.5,
        "sibling_overlap": p**2,
        "surprisal": max(0.02, 1.5 * (1 - p)),
        "prompt_retrieval": p,
        "prompt_information": p,
        "grad_norm": 0.5,
        "updated": 1.0,
        "response_length": 20.0,
        "truncated": 0.0,
    }


def play(detector: Detector, run: Iterable[dict[str, float]]) -> list[Alarm]:
    found = [detector.see(step, metrics) for step, metrics in enumerate(run, start=1)]
    return [alarm for alarm in found if alarm is not None]


def changed(start: int, change: Callable[[int, dict[str, float]], None], steps: int = 60) -> Run:
    """A flat run at a success of .4, which `change(k, metrics)` spoils from step `start` on."""
    out = []
    for step in range(steps):
        metrics = healthy(10)
        if step >= start:
            change(step - start, metrics)
        out.append(metrics)
    return out


@pytest.mark.parametrize("detector", default_alarms(), ids=lambda d: d.name)
def test_a_run_that_learns_and_converges_raises_nothing(detector: Detector) -> None:
    assert play(detector, [healthy(step) for step in range(120)]) == []


@pytest.mark.parametrize("detector", default_alarms(), ids=lambda d: d.name)
def test_a_flat_run_raises_nothing(detector: Detector) -> None:
    assert play(detector, changed(99, lambda k, m: None)) == []


def echo(k: int, m: dict[str, float]) -> None:
    m["reward_std"] *= 0.8**k
    m["sibling_overlap"] = 1 - 0.8**k
    m["surprisal"] *= 0.8**k
    m["unsolved_groups"] = 0.6 * (1 - 0.8**k)


def test_the_echo_trap_is_seen_while_the_reward_still_stands() -> None:
    """Everything moves by a fifth of the rest a step, from step 31 on; the reward does not move. The spread's
    average (weight .4) lags by 1.5 steps: below half after about 5. Three times in a row: step 37 or 38."""
    (alarm,) = play(EchoTrap(), changed(30, echo))
    assert 36 <= alarm.step <= 39
    assert alarm.evidence["reward_std"] < 0.5 * alarm.evidence["reward_std_peak"]
    assert "rl.learning_rate" in alarm.advice
    assert "Advice" in alarm.sentence()
    assert Change("entropy.target", "set", round(alarm.evidence["surprisal_peak"] / 2, 3)) in alarm.remedy


def test_groups_that_are_lost_count_as_soon_as_the_other_signs() -> None:
    """From step 31 on all is at its end. After two steps the averages (weight .4) are .36 of the spread,
    1 - .6²·.84 = .70 in overlap, and .64·(.3 - .017) = .18 above the fewest lost groups: all three speak at
    steps 32, 33 and 34."""

    def at_once(k: int, m: dict[str, float]) -> None:
        m |= {"reward_std": 0.0, "sibling_overlap": 1.0, "unsolved_groups": 0.3}

    (alarm,) = play(EchoTrap(), changed(30, at_once))
    assert alarm.step == 34


def test_a_spread_that_falls_with_varied_siblings_is_no_echo() -> None:
    def spoil(k: int, m: dict[str, float]) -> None:
        m["reward_std"] *= 0.8**k

    assert play(EchoTrap(), changed(30, spoil)) == []


def test_hopeless_tasks_that_are_left_over_are_no_echo() -> None:
    """Learning ends at a success of .8: what is open then has equal rewards and equal texts, and always "
    "had."""

    def left_over(k: int, m: dict[str, float]) -> None:
        echo(k, m)
        m["unsolved_groups"] = 0.2
        m["success"] = m["reward"] = 0.8 - 0.4 * 0.8**k

    run = changed(30, left_over)
    for metrics in run[:30]:
        metrics["unsolved_groups"] = 0.3
    assert play(EchoTrap(), run) == []


def test_solved_groups_are_no_observation() -> None:
    def spoil(k: int, m: dict[str, float]) -> None:
        echo(k, m)
        m["open_groups"] = 0.0

    assert play(EchoTrap(), changed(30, spoil)) == []


@pytest.mark.parametrize(("when", "shown"), [(7, True), (2, False)])
def test_a_gradient_spike_at_the_alarm_is_added_to_the_evidence(when: int, shown: bool) -> None:
    def spoil(k: int, m: dict[str, float]) -> None:
        echo(k, m)
        m["grad_norm"] = 55.0 if k == when else 0.5

    (alarm,) = play(EchoTrap(), changed(30, spoil))
    assert alarm.step == 38
    assert alarm.evidence.get("grad_norm") == (55.0 if shown else None)


def closing(k: int, m: dict[str, float]) -> None:
    """Every second batch moves the policy far, siblings overlap, a group in five is lost; all else stands."""
    m |= {"approx_kl": 0.4 if k % 2 == 0 else 0.01, "sibling_overlap": 0.7, "unsolved_groups": 0.2}


def test_leaps_of_the_policy_close_the_trap_before_the_spread_has_fallen() -> None:
    """From step 31 on. .4 + .01 + .4 nats are more than .75 at step 33. By then the average of lost groups
    has gone (1 - .6³) = .78 of its way from .017 to .2 (.14 above the fewest), that of overlap from .16 to .7
    (.58): both are past .1 and .5. The spread has not moved, so that the first rule alone says nothing."""
    (alarm,) = play(EchoTrap(), changed(30, closing))
    assert alarm.step == 33
    assert alarm.evidence["approx_kl_of_last_5"] == pytest.approx(0.81)
    assert alarm.evidence["reward_std"] == pytest.approx(alarm.evidence["reward_std_peak"])
    assert any(change.key == "learning_rate" for change in alarm.remedy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("approx_kl", 0.14),  # five of them are .7
        ("unsolved_groups", 0.1),  # .083 more than at the start
        ("sibling_overlap", 0.49),  # siblings differ
        ("success", 0.95),  # nearly all is solved
    ],
)
def test_one_sign_less_and_no_trap_is_closing(key: str, value: float) -> None:
    def spoil(k: int, m: dict[str, float]) -> None:
        closing(k, m)
        m[key] = value

    run = changed(30, spoil)
    if key == "success":
        run = [{**m, "success": value} for m in run]
    assert play(EchoTrap(), run) == []


@pytest.mark.parametrize("apart", [3, 4, 5, 6])
def test_leaps_add_up_over_five_batches(apart: int) -> None:
    """Five batches hold two leaps that are four apart, and no more; a step without an update is no batch."""

    def spoil(k: int, m: dict[str, float]) -> None:
        closing(0, m)
        m["approx_kl"] = 0.4 if k % apart == 0 else 0.01

    def with_pauses(k: int, m: dict[str, float]) -> None:
        spoil(k // 2, m)
        if k % 2:
            m["approx_kl"] = float("nan")

    for run in (changed(30, spoil), changed(10, with_pauses)):
        assert bool(play(EchoTrap(), run)) == (apart < 5)


def test_one_update_a_batch_shows_no_leaps() -> None:
    """One update a batch: its KL is 0 up to rounding, whatever it did; the first rule is all there is."""

    def spoil(k: int, m: dict[str, float]) -> None:
        closing(k, m)
        m["approx_kl"] = 1e-9

    assert play(EchoTrap(), changed(30, spoil)) == []


def test_entropy_collapse() -> None:
    def spoil(k: int, m: dict[str, float]) -> None:
        m["surprisal"] *= 0.6**k

    (alarm,) = play(EntropyCollapse(), changed(20, spoil))
    assert alarm.evidence["surprisal"] < 0.05


def test_template_collapse_needs_entropy_that_stays() -> None:
    def agnostic(k: int, m: dict[str, float]) -> None:
        m["prompt_information"] = m["prompt_retrieval"] = 0.4 * 0.8**k

    def silent(k: int, m: dict[str, float]) -> None:
        agnostic(k, m)
        m["surprisal"] *= 0.6**k

    def settling(k: int, m: dict[str, float]) -> None:
        """Random weights that learn: text varies less, and depends less on accidents of the prompt."""
        m["prompt_information"] = m["prompt_retrieval"] = 0.4 * 0.93**k
        m["surprisal"] *= max(0.55, 0.93**k)

    (alarm,) = play(TemplateCollapse(), changed(25, agnostic))
    assert alarm.evidence["prompt_information"] < 0.2
    assert play(TemplateCollapse(), changed(25, silent)) == []
    assert play(TemplateCollapse(), changed(25, settling)) == []


def test_template_collapse_takes_ids_where_nothing_was_cross_scored() -> None:
    def agnostic(k: int, m: dict[str, float]) -> None:
        m["prompt_retrieval"] = 0.02

    run = changed(25, agnostic)
    for metrics in run:
        metrics["prompt_information"] = float("nan")
    (alarm,) = play(TemplateCollapse(), run)
    assert "prompt_retrieval" in alarm.evidence


def test_one_spike_is_no_alarm_and_two_are() -> None:
    def once(k: int, m: dict[str, float]) -> None:
        m["grad_norm"] = 40.0 if k == 0 else 0.5

    def twice(k: int, m: dict[str, float]) -> None:
        m["grad_norm"] = 40.0 if k in (0, 3) else 0.5

    def below_the_clip(k: int, m: dict[str, float]) -> None:
        m["grad_norm"] = 0.9 if k in (0, 3) else 0.01

    assert play(GradientSpike(), changed(25, once)) == []
    (alarm,) = play(GradientSpike(), changed(25, twice))
    assert alarm.step == 29  # the step numbered from 1 at which the second spike is seen
    assert alarm.evidence == {"grad_norm": 40.0, "median": 0.5, "spikes_of_last_5": 2.0}
    assert play(GradientSpike(), changed(5, below_the_clip)) == []


@pytest.mark.parametrize(("moved", "raised"), [(0.05, 0), (0.3, 1), (1e-9, 1)])
def test_spikes_count_where_the_policy_moved_or_where_nobody_knows(moved: float, raised: int) -> None:
    """`approx_kl` of a batch with one update is 0 up to rounding and says nothing."""

    def spikes(k: int, m: dict[str, float]) -> None:
        m["grad_norm"] = 40.0 if k in (0, 3) else 0.5
        m["approx_kl"] = moved if k == 0 else min(moved, 0.01)

    assert len(play(GradientSpike(), changed(25, spikes))) == raised


def test_steps_without_an_update_do_not_lower_the_median() -> None:
    def dead(k: int, m: dict[str, float]) -> None:
        m["updated"], m["grad_norm"] = (0.0, 0.0) if k % 3 else (1.0, 1.5)

    assert play(GradientSpike(), changed(0, dead)) == []


def test_length_that_earns_nothing() -> None:
    def longer(k: int, m: dict[str, float]) -> None:
        m["response_length"] = 20.0 + 4 * k

    def worth_it(k: int, m: dict[str, float]) -> None:
        longer(k, m)
        m["reward"] += 0.01 * k
        m["success"] += 0.01 * k

    def cut(k: int, m: dict[str, float]) -> None:
        m["truncated"] = 0.5

    (alarm,) = play(LengthExplosion(), changed(20, longer, steps=40))
    assert alarm.evidence["response_length"] > 40
    assert play(LengthExplosion(), changed(20, worth_it, steps=40)) == []
    (alarm,) = play(LengthExplosion(), changed(20, cut))
    assert alarm.evidence["truncated"] > 0.3


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, 29, 36, 45])
def test_a_monitor_goes_on_from_its_saved_state(cut: int) -> None:
    """Through JSON, at any step: the rest of the run raises what it would have raised."""

    def all_at_once(k: int, m: dict[str, float]) -> None:
        echo(k, m)
        m["grad_norm"] = 40.0 if k % 4 == 0 else 0.5
        m["approx_kl"] = 0.4 if k in (3, 7) else 0.01
        m["response_length"] = 20.0 + 4 * k

    run = changed(30, all_at_once)
    whole, first, second = Monitor(), Monitor(), Monitor()
    wanted = [a.plain() for k, m in enumerate(run) for a in whole.see(k, m)]
    got = [a.plain() for k, m in enumerate(run[:cut]) for a in first.see(k, m)]
    second.load(json.loads(json.dumps(first.state())))
    got += [a.plain() for k, m in enumerate(run[cut:], start=cut) for a in second.see(k, m)]
    assert got == wanted
    assert {a["name"] for a in wanted} >= {"echo_trap", "gradient_spike", "length_explosion"}


def test_an_alarm_is_raised_again_only_after_it_was_clear() -> None:
    def twice(k: int, m: dict[str, float]) -> None:
        m["surprisal"] = 0.001 if k < 20 or k >= 30 else 0.9

    alarms = play(EntropyCollapse(), changed(10, twice, steps=80))
    assert len(alarms) == 2


def test_memory_saved_before_alarms_looked_at_steps_is_read() -> None:
    """Checkpoints of earlier versions hold no `moves`."""
    for detector in (EchoTrap(), GradientSpike()):
        old = detector.state()
        del old["moves"]
        detector.load(old)
        assert detector.moves == []


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.just(0.0))


@given(st.lists(st.dictionaries(st.sampled_from([*sorted(healthy(0)), "approx_kl"]), numbers), max_size=30))
def test_any_numbers_leave_a_state_that_can_be_saved(run: list[dict[str, Any]]) -> None:
    """Missing, NaN and infinite metrics happen (no open group, an overflow); nothing may break on them."""
    monitor = Monitor()
    for step, metrics in enumerate(run):
        complete = {"response_length": 1.0, "truncated": 0.0, **metrics}
        monitor.see(step, complete)
    json.dumps(monitor.state())


def test_a_moving_average_and_its_peak() -> None:
    """Weight .5: 1, (1+3)/2 = 2, (2+0)/2 = 1. The first two cannot be a peak (settle 3), so the peak is 1."""
    s = Smoothed(weight=0.5, settle=3)
    for value in (1.0, 3.0, float("nan"), 0.0):
        s.add(value)
    assert (s.value, s.peak, s.count) == (1.0, 1.0, 3)
    s.add(0.0)
    assert s.of_peak == 0.5
    assert s.rise == 0.5 - 1.0


# -- remedies ----------------------------------------------------------------------------------------------


def test_changes() -> None:
    assert Change("a", "times", 0.5).applied(4.0) == 2.0
    assert Change("a", "at_least", 0.28).applied(0.2) == 0.28
    assert Change("a", "at_least", 0.28).applied(0.3) == 0.3
    assert Change("a", "at_most", 0.0).applied(0.3) == 0.0
    assert Change("a", "set", 0.0).applied(None) == 0.0
    with pytest.raises(ValueError, match="no value to scale"):
        Change("a", "times", 0.5).applied(None)
