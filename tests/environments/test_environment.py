"""Anyone's environment through one door: worlds, environment classes, plain classes, import paths."""

import asyncio
import re
import subprocess
import sys
import time

import pytest

from stepladder.environments.checked import CheckedWorld
from stepladder.environments.environment import as_world, load_world
from stepladder.environments.tools import tool
from stepladder.errors import ConfigError, DataError, EnvironmentFault, RewardError
from stepladder.types import Message, Reset, Score, Step, Task, ToolCall


def play(world, *messages, split="train", i=0):
    """Reset and step one environment; returns the reset and the last step."""

    async def episode():
        environment = world.make()
        out = [await environment.reset(world.get(split, i), seed=3)]
        for message in messages:
            out.append(await environment.step(message))
        await environment.close()
        return out[0], out[-1]

    return asyncio.run(episode())


def say(text):
    return Message("assistant", text)


def call(name, **arguments):
    return Message("assistant", tool_calls=(ToolCall(name, arguments, id="1"),))


class Shop:
    """The newcomer's class of the documentation."""

    def __init__(self, currency="euro"):
        self.prices = {"tea": 4, "jam": 7}
        self.currency = currency

    @tool
    def price(self, item: str) -> str:
        """The price of an item."""
        return f"{self.prices[item]} {self.currency}"

    def reward(self, answer: str) -> float:
        return float(self.task.reference in answer)

    @staticmethod
    def tasks(split: str) -> list[dict]:
        names = {"train": ["tea", "jam"], "test": ["rice"]}[split]
        return [{"prompt": f"Price of {n}?", "reference": "4", "aisle": 2, "domain": n} for n in names]


def test_a_plain_class_is_an_environment():
    world = as_world(Shop, currency="pound")
    assert world.name == "Shop"
    assert world.splits() == ("train", "test")
    assert (world.count("train"), world.count("test")) == (2, 1)
    assert world.get("train", 1) == Task(
        "train/1", "train", "jam", (Message("user", "Price of jam?"),), "4", seed=1, data={"aisle": 2}
    )
    reset, step = play(world, call("price", item="tea"))
    assert [t.name for t in reset.tools] == ["price"]
    assert reset.messages == (Message("user", "Price of tea?"),)
    assert step.messages[0].text == "4 pound"
    assert (step.terminated, step.reward) == (False, 0.0)
    _, step = play(world, call("price", item="tea"), say("It costs 4."))
    assert (step.terminated, step.reward) == (True, 1.0)
    assert play(world, say("No idea"))[1].reward == 0.0


def test_a_plain_class_may_be_async_keep_score_and_end_in_a_tool():
    class Door:
        opened = False

        async def reset(self, task, seed):
            await asyncio.sleep(0)
            self.seed = seed
            return [{"role": "system", "content": "Be brief."}, "Open it.", Message("user", "Now.")]

        @tool
        async def open(self, key: int) -> str:
            self.done = True
            return "open"

        async def reward(self, answer, task):
            return Score(0.5, {"seed": self.seed, "task": float(task.reference)}, "because")

    world = as_world(Door, tasks=[{"reference": 2}])
    reset, step = play(world, call("open", key=1))
    assert [m.role for m in reset.messages] == ["system", "user", "user"]
    assert [m.text for m in step.messages] == ["open"]
    assert (step.terminated, step.reward, step.rewards) == (True, 0.5, {"seed": 3.0, "task": 2.0})
    assert step.info["explanation"] == "because"


def test_one_object_per_episode():
    class Counter:
        n = 0

        @tool
        def up(self) -> int:
            self.n += 1
            return self.n

    world = as_world(Counter, tasks=["Count."])
    assert play(world, call("up"), call("up"))[1].messages[0].text == "2"
    assert play(world, call("up"))[1].messages[0].text == "1"
    # no reward of its own: 0, for reward functions to add to
    assert play(world, say("2"))[1].reward == 0.0


class Echo:
    """An Environment class, with plain methods."""

    def reset(self, task, *, seed):
        self.task = task
        return Reset(task.messages)

    def step(self, message):
        return Step(reward=float(message.text == self.task.reference), terminated=True)

    def close(self):
        pass


def test_an_environment_class_is_a_world_by_itself():
    rows = [{"prompt": "a?", "reference": "a"}, {"prompt": "b?", "split": "test"}, Task("x", "test")]
    world = as_world(Echo, tasks=rows)
    assert world.splits() == ("train", "test")
    assert world.count("test") == 2
    assert world.get("test", 1) == Task("x", "test")
    assert play(world, say("a"))[1].reward == 1.0

    class Own(Echo):
        @classmethod
        def splits(cls):
            return ["dev"]

        @classmethod
        def count(cls, split):
            return 3

        @classmethod
        def get(cls, split, i):
            return {"prompt": str(i), "reference": str(i)}

    assert play(as_world(Own), say("2"), split="dev", i=2)[1].reward == 1.0


class Custom:
    """A World with an answer of each kind to spoil."""

    def __init__(self, **answers):
        self.answers = answers

    def splits(self):
        return self.answers.get("splits", ["train"])

    def count(self, split):
        return self.answers.get("count", 2)

    def get(self, split, i):
        return self.answers.get("get", "Say a.")

    async def setup(self):
        self.ready = True

    def make(self):
        outer = self.answers

        class Inner(Echo):
            def reset(self, task, *, seed):
                return outer.get("reset", Reset(task.messages))

            def step(self, message):
                return outer.get("step", Step())

        return Inner()


def test_a_world_is_taken_as_instance_or_class_and_once():
    world = as_world(Custom())
    assert as_world(world) is world
    asyncio.run(world.setup())
    assert world.ready is True  # what only the inner world has stays reachable
    asyncio.run(world.teardown())  # it has none, and needs none
    assert isinstance(as_world(Custom, step=Step()), CheckedWorld)
    reset, _ = play(world, say("a"))
    assert reset.messages == (Message("user", "Say a."),)
    with pytest.raises(DataError, match="task 2 was asked for"):
        world.get("train", 2)
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        world.count("trian")
    assert not hasattr(world, "no_such_thing")


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"splits": "train"}, TypeError, "splits() of Custom returned 'train'"),
        ({"count": "2"}, TypeError, "count('train') of Custom returned '2'"),
        ({"get": 7}, DataError, "task 0 of split 'train' from get() of Custom is 7"),
        ({"get": {"prompt": 7}}, DataError, "gave 7"),
        ({"reset": 7}, TypeError, "reset() of Custom gave 7; give a str"),
        ({"reset": None}, TypeError, "reset() of Custom gave None"),
        ({"reset": [1]}, TypeError, "reset() of Custom gave 1 as a message"),
        ({"reset": {"role": "robot", "content": ""}}, TypeError, "role 'robot'; the roles are system, user"),
        ({"reset": {"role": "user", "content": 3}}, TypeError, "gave 3 as message content"),
        ({"reset": {"role": "system", "content": "x"}}, TypeError, "end with one from 'user' or 'tool'"),
        ({"reset": []}, TypeError, "there are none"),
        ({"reset": Reset((Message("user"),), tools=(len,))}, TypeError, "as a tool"),
        ({"step": 1.0}, TypeError, "step() of Custom returned 1.0; return a Step"),
        ({"step": Step(reward="1")}, RewardError, "step() of Custom returned '1'"),
        ({"step": Step(reward=float("nan"))}, RewardError, "return a finite number"),
        ({"step": Step(rewards={"a": float("inf")})}, RewardError, "rewards['a']"),
        ({"step": Step(terminated=1)}, TypeError, "terminated is 1"),
        ({"step": Step((Message("assistant", "me"),))}, TypeError, "only the policy speaks"),
        ({"step": Step((3,))}, TypeError, "gave 3 as a message"),
    ],
)
def test_wrong_answers_name_the_method(answers, error, message):
    with pytest.raises(error) as caught:
        play(as_world(Custom(**answers)), say("a"))
    assert message in str(caught.value)


def test_answers_are_coerced():
    _, step = play(
        as_world(Custom(step=Step(["text", {"role": "user", "content": "hi"}], reward=True))), say("")
    )
    assert step.messages == (Message("tool", "text"), Message("user", "hi"))
    assert step.reward == 1.0
    assert type(step.reward) is float


def reward_of(value):
    class Judge:
        def reward(self, answer):
            return value

    return as_world(Judge, tasks=["?"])


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (True, 1.0), (None, None), (0.25, 0.25), (Score(None), None)]
)
def test_rewards_are_numbers_scores_or_none(value, reward):
    assert play(reward_of(value), say("a"))[1].reward == reward


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "reward() of Judge returned 'yes'; return a number, a Score, or None"),
        ([1.0], "returned [1.0]"),
        (float("nan"), "returned nan; return a finite number"),
        (Score(1.0, {"part": float("inf")}), "part 'part'"),
        (1j, "returned 1j"),
    ],
)
def test_other_rewards_are_refused(value, message):
    with pytest.raises(RewardError) as caught:
        play(reward_of(value), say("a"))
    assert message in str(caught.value)


PHASES = ["reset", "reward", "close", "tool"]


def failing(phase, act):
    class Failing:
        def reset(self, task):
            return act() if phase == "reset" else "go"

        @tool(name="tool")
        def use(self) -> str:
            return act() if phase == "tool" else "used"

        def reward(self, answer):
            return act() if phase == "reward" else 1.0

        def close(self):
            return act() if phase == "close" else None

    return as_world(Failing, tasks=["?"], deadline=0.1, tool_deadline=0.1)


def hang():
    time.sleep(1.0)


def fail():
    raise ConnectionError("gone")


def mistake():
    raise AttributeError("typo")


@pytest.mark.parametrize("phase", PHASES)
def test_fault_96_a_phase_that_hangs_is_ended_with_its_name(phase):
    world = failing(phase, hang)
    if phase == "tool":
        assert "took longer than 0.1 s" in play(world, call("tool"))[1].messages[0].text
        return
    error = RewardError if phase == "reward" else EnvironmentFault
    with pytest.raises(error, match=re.escape(f"{phase}() of Failing gave no result within 0.1 s")):
        play(world, say("a"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_fails_is_data_with_its_name(phase):
    world = failing(phase, fail)
    if phase == "tool":
        assert play(world, call("tool"))[1].messages[0].text == "Error: ConnectionError: gone"
        return
    error = RewardError if phase == "reward" else EnvironmentFault
    with pytest.raises(error, match=re.escape(f"{phase}() of Failing raised ConnectionError: gone")):
        play(world, say("a"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_programming_error_is_loud_in_every_phase(phase):
    with pytest.raises(AttributeError, match="typo"):
        play(failing(phase, mistake), call("tool"), say("a"))


@pytest.mark.parametrize(("error", "seen"), [(OSError, EnvironmentFault), (NameError, NameError)])
def test_an_object_that_cannot_be_made(error, seen):
    class Locked:
        def __init__(self):
            raise error("no")

        def reward(self, answer): ...

    with pytest.raises(seen, match="no"):
        as_world(Locked, tasks=["?"]).make()


def test_no_torch_is_loaded():
    code = (
        "import sys, stepladder.environments.check, stepladder.rewards.reward\n"
        "from stepladder.environments.environment import load_world\n"
        "load_world('calculator'), load_world('hidden_digit')\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_fault_99_siblings_share_the_environment_seed():
    class Dice:
        def reset(self, task, seed):
            return f"seed {seed}"

        def reward(self, answer):
            return 1.0

    world = as_world(Dice, tasks=["?"])

    async def group():
        environments = [world.make() for _ in range(8)]
        return await asyncio.gather(*(e.reset(world.get("train", 0), seed=5) for e in environments))

    assert {reset.messages[0].text for reset in asyncio.run(group())} == {"seed 5"}


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (int, {}, "has no method marked @tool"),
        (Shop(), {}, "give the class (Shop) itself"),
        ("calculator", {}, "write load_world('calculator')"),
        (Shop, {"curency": "x"}, "Did you mean 'currency'"),
        (Shop, {"task": []}, "Did you mean 'tasks'"),
        (Echo, {}, "Echo has no tasks"),
        (Echo, {"size": 1}, "Echo has no option 'size'"),
        (Custom(), {"tasks": []}, "is already made"),
    ],
)
def test_what_is_no_environment_is_refused(target, options, message):
    with pytest.raises(ConfigError) as caught:
        as_world(target, **options)
    assert message in str(caught.value)


def test_bad_tasks_name_their_row():
    for tasks, message in [
        ("one string", "give a list of tasks"),
        ([{"prompt": "ok"}, 5], "task 1 of split 'train' from tasks= is 5"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            as_world(Echo, tasks=tasks).count("train")

    class Late:
        def reward(self, answer): ...
        def tasks(self, split): ...

    with pytest.raises(ConfigError, match="write @staticmethod"):
        as_world(Late).count("train")
    with pytest.raises(ConfigError, match="opens with no message"):
        play(as_world(Shop, tasks=[{"reference": "4"}]))


def test_worlds_load_by_name_and_by_path(tmp_path):
    assert load_world("calculator", seed=3).inner.seed == 3
    assert (
        load_world("stepladder.environments.worlds.hidden_digit:HiddenDigitWorld").name == "HiddenDigitWorld"
    )
    file = tmp_path / "mine.py"
    file.write_text(
        "class Env:\n    def reward(self, answer): return 1.0\n    tasks = staticmethod(lambda s: ['?'])\n"
    )
    assert load_world(f"{file}:Env").get("train", 0).messages[0].text == "?"
    for name, message in [
        ("calculater", "Did you mean 'calculator'"),
        ("no_such_module:Env", "'no_such_module' was not found"),
        (f"{tmp_path}/mien.py:Env", "Did you mean 'mine.py'"),
        (f"{file}:Enw", "Did you mean 'Env'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_world(name)
        assert message in str(caught.value)


def test_a_light_episode_costs_far_less_than_a_millisecond_of_cpu():
    world = load_world("calculator")
    task, answer = world.get("train", 0), say("Answer: 1")

    async def episodes(n):
        for _ in range(n):
            environment = world.make()
            await environment.reset(task, seed=0)
            await environment.step(answer)
            await environment.close()

    asyncio.run(episodes(10))
    began = time.process_time()
    asyncio.run(episodes(200))
    assert (time.process_time() - began) / 200 < 1e-3  # measured: 0.03 ms


def test_an_option_may_have_any_name():
    class Named(Echo):
        def __init__(self, name, target):
            self.said = (name, target)

    assert as_world(Named, tasks=["?"], name="n", target="t").make().inner.said == ("n", "t")


class Torn:
    """Task 3 cannot be read."""

    def __init__(self, error):
        self.error = error

    def splits(self):
        return ["train"]

    def count(self, split):
        return 5

    def get(self, split, i):
        if i == 3:
            raise self.error
        return {"prompt": "?"}

    def make(self):
        return None


def test_a_task_that_cannot_be_read_is_named():
    world = CheckedWorld(Torn(OSError("bad sector")))
    assert world.get("train", 2).id
    with pytest.raises(
        DataError, match=r"task 3 of split 'train' .* get\(\) of Torn raised OSError: bad sector"
    ):
        world.get("train", 3)
    with pytest.raises(NameError, match="typo") as caught:
        CheckedWorld(Torn(NameError("typo"))).get("train", 3)
    assert caught.value.__notes__ == ["raised in get('train', 3) of Torn"]
