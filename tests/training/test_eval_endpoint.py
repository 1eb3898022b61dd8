"""eval: an endpoint that is not there, and the rewards of the recipe."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from spine import digit_recipe
from test_commands import clever, endpoint

from stepladder.errors import ConfigError
from stepladder.evaluation import Evaluation
from stepladder.training.evaluate import evaluate_model
from stepladder.training.ladder import train
from stepladder.training.progress import Display
from stepladder.types import Task


def half(answer: str, task: Task) -> float:
    """A reward function, named by the path of this file."""
    return 0.5


def evaluated(model: str, environment: str, *overrides: str) -> Evaluation:
    return evaluate_model(
        model,
        environment=environment,
        overrides=overrides,
        tasks=2,
        split="test",
        temperature=0.0,
        seed=0,
        endpoint_model="some-model",
        out=None,
    )


def test_an_endpoint_where_nothing_listens_stops_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound, never listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ConfigError, match=rf"nothing answers at {url}.*http://localhost:8000/v1"):
            evaluated(url, "calculator")
    assert "solved" not in capsys.readouterr().out


def test_why_episodes_failed_is_printed_and_a_server_that_reads_no_calls_is_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM refuses tools with these words when it was started without a parser."""
    refusal = {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}
    with endpoint(lambda body: (400, refusal)) as (url, _):
        assert evaluated(url, "calculator").failed == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "the first failure, at the engine: the endpoint answered 400" in said
    assert "--tool-call-parser NAME" in said


def test_an_endpoint_is_scored_by_the_rewards_asked_for() -> None:
    """`GET models` of this server is no 200, which does not matter."""
    with endpoint(clever) as (url, _):
        result = evaluated(url, "calculator", f"environment.rewards=['{__file__}:half']")
    assert [t.score.parts["half"] for t in result.trajectories] == [0.5, 0.5]


def test_a_run_is_evaluated_with_the_rewards_of_its_training(tmp_path: Path) -> None:
    short = ("rl=null", "sft.epochs=1", "evaluation.raw=0", "evaluation.tasks=2")
    recipe = digit_recipe(tmp_path, "run", *short, f"environment.rewards=['{__file__}:half']")
    path = train(recipe, display=Display(quiet=True))
    result = evaluated(str(path), "hidden_digit")
    assert [t.score.parts["half"] for t in result.trajectories] == [0.5, 0.5]
