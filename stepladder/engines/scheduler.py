"""Continuous batching: admit, prefill, decode one token a row, fork rows whose members differ.

Single-threaded and free of asyncio: `LocalEngine` calls `step` from its compute thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from stepladder.engines.admission import Ids, batches, shared_prefixes
from stepladder.engines.cache import SlotCache
from stepladder.engines.forward import Forward
from stepladder.engines.prefix_cache import PrefixCache, join
from stepladder.engines.request import MIXED, Holder, Request, Row, Stats
from stepladder.engines.sampler import sample

LEAST_SHARED = 16  # tokens; below this a pass of its own costs more than it saves


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes a scheduler works within."""

    max_rows: int
    max_context: int
    prefill_tokens: int  # a prefill batch computes about this many at most
    pad_token_id: int = 0


class Scheduler:
    """Rows 0 .. n-1 of the cache are live. Capacity is counted in requests, for each may need its own row."""

    def __init__(
        self,
        forward: Forward,
        store: SlotCache | None,
        prefixes: PrefixCache,
        limits: Limits,
        *,
        ordered: bool,
    ) -> None:
        self.forward, self.store, self.prefixes = forward, store, prefixes
        self.limits, self.ordered = limits, ordered
        self.version = 0
        self.waiting: list[Request] = []
        self.rows: list[Row] = []
        self.stats = Stats()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def step(self) -> None:
        """Admit what fits, then one token for every live row."""
        start = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        self._decode()
        self.stats.seconds += time.perf_counter() - start

    def score(self, ids: Tensor) -> list[float]:
        """log p of `ids[0, 1:]` in a spare slot, from the first token on: no prefix is used or kept."""
        slot = len(self.rows)
        self.forward.reserve(slot + 1, ids.shape[1])
        logits = self.forward.run(ids, [0], slot, None)[0, :-1].float()
        self.forward.drop(slot)
        targets = ids[0, 1:, None].to(logits.device)
        return logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()

    def outdate(self, *, recompute: bool) -> None:
        """The weights changed: prefixes are dropped; live rows are marked, or prefilled again."""
        self.prefixes.clear()
        if recompute:
            self.waiting = [m for row in self.rows for m in row.members] + self.waiting
            self._remove(list(range(len(self.rows))))
        for row in self.rows:
            row.version = MIXED

    def release(self, holder: Holder) -> None:
        """A session ended."""
        if holder.node is not None:
            self.prefixes.release(holder.node)
            holder.node = None

    # Admission and prefill

    def _admit(self) -> None:
        free = self.limits.max_rows - sum(len(row.members) for row in self.rows)
        if not self.waiting or free <= 0:
            return
        if not self.rows:
            self.forward.clear()
        if self.ordered:
            self.waiting.sort(key=lambda request: request.rank)
        batch, self.waiting = self.waiting[:free], self.waiting[free:]
        groups: list[tuple[Ids, list[Request]]] = [(r.prompt + tuple(r.ids), [r]) for r in batch]
        if self.forward.shares:
            merged: dict[Ids, list[Request]] = {}
            for ids, (request,) in groups:
                merged.setdefault(ids, []).append(request)
            groups = list(merged.items())
            for prefix in shared_prefixes([ids for ids, _ in groups], self._known, LEAST_SHARED):
                self._compute_prefix(prefix)
        self.stats.prefill_saved += sum(len(ids) * len(members) for ids, members in groups)
        starts = [self._source(ids[:-1]) for ids, _ in groups]
        order = sorted(range(len(groups)), key=lambda i: starts[i] - len(groups[i][0]))
        self.forward.reserve(len(self.rows) + len(groups), max(len(ids) for ids, _ in groups))
        first = 0
        for size in batches([len(groups[i][0]) - starts[i] for i in order], self.limits.prefill_tokens):
            chosen = order[first : first + size]
            self._start_rows([groups[i] for i in chosen], [starts[i] for i in chosen])
            first += size

    def _known(self, ids: Ids) -> int:
        return self.prefixes.match(ids)[0]

    def _source(self, ids: Ids) -> int:
        """How many leading positions of `ids` need no computing."""
        if not self.forward.shares:
            return 0
        return len(ids) if self._live(ids) is not None else self._known(ids)

    def _live(self, ids: Ids) -> int | None:
        """A live row that holds all of `ids`, computed by the current weights."""
        count = len(ids)
        for slot, row in enumerate(self.rows):
            if row.version == self.version and len(row.ids) >= count and tuple(row.ids[:count]) == ids:
                return slot
        return None

    def _start_rows(self, groups: list[tuple[Ids, list[Request]]], starts: list[int]) -> None:
        """Prefill one batch of new rows (a batch has similar lengths) and draw their first tokens."""
        slot = len(self.rows)
        width = max(len(ids) - start for (ids, _), start in zip(groups, starts, strict=True))
        self.forward.reserve(slot + len(groups), max(starts) + width)
        starts = [self._restore(slot + i, ids[:-1], starts[i]) for i, (ids, _) in enumerate(groups)]
        new = [list(ids[start:]) for (ids, _), start in zip(groups, starts, strict=True)]
        logits = self._prefill(new, starts, slot)
        rows = [Row(list(ids), members, self.version) for ids, members in groups]
        self.rows += rows
        self._advance(slot, rows, logits)

    def _restore(self, slot: int, ids: Ids, start: int) -> int:
        """Fill a slot from a live row or from the prefix cache; returns how many positions it holds."""
        if start == 0:
            return 0
        if start == len(ids) and (live := self._live(ids)) is not None:
            self.forward.move(live, slot, start)
            return start
        assert self.store is not None
        depth, pieces = self.prefixes.match(ids[:start])
        if depth:  # may be less than planned, where it was evicted since: then more is computed
            self.store.write(slot, 0, join(pieces))
        return depth

    def _prefill(self, new: list[list[int]], starts: list[int], slot: int) -> Tensor:
        """Append token lists to the slots from `slot` on; logits [k, V] after each row's last token."""
        self.stats.prefill_computed += sum(map(len, new))
        self.stats.prefill_saved -= sum(map(len, new))
        piece = self.limits.prefill_tokens if self.forward.shares and len(new) == 1 else max(map(len, new))
        while len(new[0]) > piece:  # one long row: in pieces, to bound the memory of its attention
            self.forward.run(torch.tensor([new[0][:piece]]), starts, slot, [piece - 1])
            new, starts = [new[0][piece:]], [starts[0] + piece]
        width = max(map(len, new))
        pad = self.limits.pad_token_id
        ids = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens in new])
        self.stats.prefill_padded += ids.numel() - sum(map(len, new))
        self.forward.reserve(slot + len(new), max(starts) + width)
        return self.forward.run(ids, starts, slot, [len(tokens) - 1 for tokens in new])

    def _compute_prefix(self, ids: Ids) -> None:
        """Compute a prefix that several prompts share, in a spare slot, and keep it."""
        assert self.store is not None
        store, slot = self.store, len(self.rows)
        depth, pieces = self.prefixes.match(ids)
        self.forward.reserve(slot + 1, len(ids))
        if depth:
            store.write(slot, 0, join(pieces))
        if depth < len(ids):
            self._prefill([list(ids[depth:])], [depth], slot)
        self.prefixes.insert(ids, lambda start, end: store.read(slot, start, end), keep=True)

    # Decoding

    def _decode(self) -> None:
        if not self.rows:
            return
        rows = list(self.rows)
        padding = -len(rows) % self.forward.row_multiple
        ids = torch.tensor([[row.pending] for row in rows] + [[self.limits.pad_token_id]] * padding)
        starts = [len(row.ids) for row in rows] + [0] * padding
        self.forward.reserve(len(starts), max(starts) + 1)
        logits = self.forward.run(ids, starts, 0, [0] * len(starts))[: len(rows)]
        self.stats.steps += 1
        self.stats.row_steps += len(rows)
        for row in rows:
            row.ids.append(row.pending)
        self._advance(0, rows, logits)

    def _advance(self, first: int, rows: list[Row], logits: Tensor) -> None:
        """Draw a token for every member of `rows` (slots from `first` on); finish, fork, compact."""
        drawn = [(i, member) for i, row in enumerate(rows) for member in row.members]
        tokens, logprobs = sample(
            logits,
            [i for i, _ in drawn],
            [member.sampling.temperature for _, member in drawn],
            [member.uniform for _, member in drawn],
        )
        self.stats.generated += len(drawn)
        for (_, member), token, logprob in zip(drawn, tokens, logprobs, strict=True):
            member.accept(token, logprob, self.version)
        ended: list[int] = []
        forks: list[tuple[int, Row]] = []
        for i, row in enumerate(rows):
            split = self._split(first + i, row)
            if not split:
                ended.append(first + i)
            for j, (token, members) in enumerate(split.items()):
                if j == 0:
                    row.pending, row.members = token, members
                else:
                    forks.append((first + i, Row(list(row.ids), members, row.version, token)))
        self._fork(forks, ended)
        self._remove(ended)

    def _split(self, slot: int, row: Row) -> dict[int, list[Request]]:
        """Finish the members that are over; the others by the token they drew."""
        going: dict[int, list[Request]] = {}
        over = []
        for member in row.members:
            reason = member.finished(self.limits.max_context)
            if reason is None:
                going.setdefault(member.ids[-1], []).append(member)
            else:
                over.append((member, reason))
        if over and self.forward.shares and row.version == self.version:
            self._park(slot, row, [member.holder for member, _ in over])
        for member, reason in over:
            member.done(member.result(reason))
        return going

    def _park(self, slot: int, row: Row, holders: list[Holder]) -> None:
        """Keep the cache of a finished turn for the sessions' next one."""
        assert self.store is not None
        store = self.store
        node = self.prefixes.insert(tuple(row.ids), lambda start, end: store.read(slot, start, end))
        for holder in holders:
            self.prefixes.hold(node)
            self.release(holder)
            holder.node = node

    def _fork(self, forks: list[tuple[int, Row]], ended: list[int]) -> None:
        """Give new rows a copy of their origin's cache, in the slots of ended rows first."""
        self.forward.reserve(len(self.rows) + max(0, len(forks) - len(ended)), 0)
        for origin, row in forks:
            if ended:
                target = ended.pop()
                self.rows[target] = row
            else:
                target = len(self.rows)
                self.rows.append(row)
            self.forward.move(origin, target, len(row.ids))

    def _remove(self, slots: list[int]) -> None:
        """Close the holes: the last row moves into each."""
        for slot in sorted(slots, reverse=True):
            last = self.rows.pop()
            self.forward.drop(slot)
            if slot < len(self.rows):
                self.forward.move(len(self.rows), slot, len(last.ids))
                self.rows[slot] = last

    def _drop_cancelled(self) -> None:
        self.waiting = [request for request in self.waiting if not request.cancelled]
        empty = []
        for slot, row in enumerate(self.rows):
            row.members = [member for member in row.members if not member.cancelled]
            if not row.members:
                empty.append(slot)
        self._remove(empty)
