"""Environments that break in every phase, named by path in recipes of the command line's tests."""

from __future__ import annotations

TASKS = [{"prompt": "?", "reference": "1"}] * 20


class Reset:
    @staticmethod
    def tasks(split: str) -> list[dict[str, str]]:
        return TASKS

    def reset(self, task: object) -> None:
        raise OSError("the sandbox is gone")

    def reward(self, answer: str) -> float:
        return 0.0


class Reward:
    @staticmethod
    def tasks(split: str) -> list[dict[str, str]]:
        return TASKS

    def reward(self, answer: str) -> float:
        raise ValueError("no verdict")


class Typo(Reward):
    def reward(self, answer: str) -> float:
        return answr.count("1")  # type: ignore[name-defined]


class Empty(Reward):
    @staticmethod
    def tasks(split: str) -> list[dict[str, str]]:
        return []

    def reward(self, answer: str) -> float:
        return 0.0
