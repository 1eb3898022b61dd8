"""Finished and shared prefixes with their keys and values, in a radix tree over token ids.

Three things are one here: the cache of a session between its turns, the prompt that siblings share, and
the system prompt that all tasks share. What may be reused is decided by comparing ids, never assumed.
All of it was computed by one version of the weights: the scheduler clears the tree at every sync.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepladder.data.prefix import common_prefix


@dataclass(eq=False, slots=True)
class Node:
    """A run of ids after its parent's, with their keys and values [layers, 2, kv_heads, len(ids), d]."""

    ids: tuple[int, ...]
    kv: Tensor | None
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    holders: int = 0  # open sessions whose history ends here
    keep: bool = False  # a prefix that many prompts share
    used: int = 0  # the clock of the last use

    @property
    def bytes(self) -> int:
        return 0 if self.kv is None else self.kv.numel() * self.kv.element_size()


class PrefixCache:
    """A radix tree of at most `max_bytes`; the least recently used leaf goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._root = Node((), None, None)
        self._clock = 0

    def clear(self) -> None:
        """Forget everything. Nodes that sessions still hold become unreachable, and harmless."""
        self._root = Node((), None, None)
        self.bytes = 0

    def match(self, ids: tuple[int, ...]) -> tuple[int, list[Tensor]]:
        """The longest stored prefix of `ids`: its length, and its pieces in order (views, not copies)."""
        self._clock += 1
        node, depth, pieces = self._root, 0, []
        while depth < len(ids) and (child := node.children.get(ids[depth])) is not None:
            shared = common_prefix(child.ids, ids[depth : depth + len(child.ids)])
            child.used = self._clock
            assert child.kv is not None
            pieces.append(child.kv[:, :, :, :shared])
            depth += shared
            if shared < len(child.ids):
                break
            node = child
        return depth, pieces

    def insert(self, ids: tuple[int, ...], read: Callable[[int, int], Tensor], *, keep: bool = False) -> Node:
        """Store `ids`; `read(start, end)` copies the keys and values of positions start .. end-1.

        Only what the tree does not have yet is read. Returns the node where `ids` ends.
        """
        self._clock += 1
        node, depth = self._root, 0
        while depth < len(ids):
            child = node.children.get(ids[depth])
            if child is None:
                child = Node(ids[depth:], read(depth, len(ids)), node)
                node.children[ids[depth]] = child
                self.bytes += child.bytes
            else:
                shared = common_prefix(child.ids, ids[depth : depth + len(child.ids)])
                if shared < len(child.ids):
                    child = self._split(child, shared)
            child.used = self._clock
            child.keep |= keep
            depth += len(child.ids)
            node = child
        self._evict(spare=node)
        return node

    def hold(self, node: Node) -> None:
        """A session's history ends at `node`: not dropped before `release`, unless memory runs out."""
        node.holders += 1

    def release(self, node: Node) -> None:
        """The session is over; what only it needed is dropped."""
        node.holders -= 1
        while node.parent is not None and not (node.children or node.holders or node.keep):
            parent = node.parent
            self._remove(node)
            node = parent

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half. Copies, so that each half can be freed alone."""
        assert node.kv is not None
        assert node.parent is not None
        upper = Node(
            node.ids[:at], node.kv[:, :, :, :at].clone(), node.parent, used=node.used, keep=node.keep
        )
        node.parent.children[node.ids[0]] = upper
        node.ids, node.kv, node.parent = node.ids[at:], node.kv[:, :, :, at:].clone(), upper
        upper.children[node.ids[0]] = node
        return upper

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        if node.parent.children.get(node.ids[0]) is node:
            del node.parent.children[node.ids[0]]
            if self._reachable(node.parent):
                self.bytes -= node.bytes
        node.kv, node.parent = None, None

    def _reachable(self, node: Node) -> bool:
        while node.parent is not None:
            node = node.parent
        return node is self._root

    def _evict(self, spare: Node) -> None:
        while self.bytes > self.max_bytes:
            leaves = [leaf for leaf in self._leaves() if leaf is not spare]
            if not leaves:
                return
            self._remove(min(leaves, key=lambda leaf: leaf.used))

    def _leaves(self) -> list[Node]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                found.append(node)
        return found


def join(pieces: list[Tensor]) -> Tensor:
    """The pieces of a match as one tensor."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)
