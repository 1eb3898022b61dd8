"""Your own environment: an agent that looks up prices in a shop."""

import random
import re

from stepladder.environments.tools import tool

GOODS = ["tea", "jam", "soap", "rice", "oil", "salt", "milk", "bread"]


class Shop:
    def reset(self, task):
        rng = random.Random(task.data["shop"])
        self.prices = {item: rng.randint(10, 99) for item in GOODS}
        return f"You are in shop {task.data['shop']}. What does {task.data['item']} cost?"

    @tool
    def price(self, item: str) -> int:
        """The price of one item in this shop."""
        if item not in self.prices:
            raise ValueError(f"no {item} here; there is {', '.join(self.prices)}")
        return self.prices[item]

    def reward(self, answer: str) -> float:
        numbers = re.findall(r"\d+", answer)
        return float(numbers[-1:] == [str(self.prices[self.task.data["item"]])])

    @staticmethod
    def tasks(split: str) -> list[dict]:
        first = 0 if split == "train" else 1000  # other shops, other prices
        return [{"shop": n, "item": GOODS[n % len(GOODS)]} for n in range(first, first + 200)]


if __name__ == "__main__":
    import stepladder

    recipe = {"run": {"name": "shop"}, "rl": {"steps": 5}, "evaluation": {"tasks": 40, "raw": 40}}
    print(stepladder.train(recipe, environment=Shop))
