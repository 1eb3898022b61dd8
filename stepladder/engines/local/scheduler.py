"""Continuous batching: admit, prefill, decode one token a row, fork rows whose members differ.

Single-threaded and free of asyncio: `LocalEngine` calls `step` from its compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepladder.engines.local.admission import Ids, batches, shared_prefixes
from stepladder.engines.local.cache import SlotCache
from stepladder.engines.local.forward import Forward
from stepladder.engines.local.prefix_cache import PrefixCache, join
from stepladder.engines.local.request import MIXED, DecodedRow, Holder, Request
from stepladder.engines.local.sampler import sample
from stepladder.engines.stats import Stats

LEAST_SHARED = 16  # tokens; below this a pass of its own costs more than it saves


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes a scheduler works within."""

    max_rows: int
    max_context: int
    prefill_tokens: int  # of prompts, in one pass, about at most


class Scheduler:
    """Rows 0 .. n-1 of the cache are live. Capacity is counted in requests, for each may need its own row."""

    def __init__(
        self,
        forward: Forward,
        store: SlotCache | None,
        prefixes: PrefixCache,
        limits: BatchLimits,
        *,
        ordered: bool,
    ) -> None:
        self.forward, self.store, self.prefixes = forward, store, prefixes
        self.limits, self.ordered = limits, ordered
        self.version = 0
        self.waiting: list[Request] = []
        self.rows: list[DecodedRow] = []
        self.stats = Stats()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def step(self) -> None:
        """Admit what fits, then one token for every live row, new ones included."""
        start = time.perf_counter()
        self.drop_cancelled()
        self._admit()
        self._decode()
        self.stats.seconds += time.perf_counter() - start

    def score(self, ids: Sequence[int]) -> list[float]:
        """log p of `ids[1:]` in a spare slot, from the first token on: no prefix is used or kept."""
        slot = len(self.rows)
        self.forward.reserve(slot + 1, len(ids))
        logits = self.forward.run([ids], [0], slot, every=True)[:-1].float()
        self.forward.drop(slot)
        targets = torch.tensor(ids[1:], dtype=torch.long, device=logits.device)[:, None]
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
        self.forward.reserve(len(self.rows) + len(batch), max(len(ids) for ids, _ in groups))
        lengths = [len(groups[i][0]) - starts[i] for i in order]
        sizes = batches(lengths, self.limits.prefill_tokens, ragged=self.forward.ragged)
        first = 0
        for number, size in enumerate(sizes, start=1):
            chosen = order[first : first + size]
            first += size
            rows = self._place([groups[i] for i in chosen], [starts[i] for i in chosen])
            if number < len(sizes) or not self.forward.ragged:  # else the last ride along with the others
                self._compute(len(self.rows) - len(rows), rows)

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

    def _place(self, groups: list[tuple[Ids, list[Request]]], starts: list[int]) -> list[DecodedRow]:
        """New rows in the next slots, with what their caches lack as pending tokens."""
        rows = []
        for (ids, members), start in zip(groups, starts, strict=True):
            slot = len(self.rows)
            self.forward.reserve(slot + 1, start)
            held = self._restore(slot, ids[:-1], start)
            row = DecodedRow(list(ids[:held]), members, self.version, list(ids[held:]))
            self.rows.append(row)
            rows.append(row)
        return rows

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

    def _compute_prefix(self, ids: Ids) -> None:
        """Compute a prefix that several prompts share, in a spare slot, and keep it."""
        assert self.store is not None
        store, slot = self.store, len(self.rows)
        depth, pieces = self.prefixes.match(ids)
        self.forward.reserve(slot + 1, len(ids))
        if depth:
            store.write(slot, 0, join(pieces))
        self._run([DecodedRow(list(ids[:depth]), [], self.version, list(ids[depth:]))], slot)
        self.prefixes.insert(ids, lambda start, end: store.read(slot, start, end), keep=True)

    # Decoding

    def _decode(self) -> None:
        if self.rows:
            decoding = sum(row.drawn for row in self.rows)
            self.stats.steps += decoding > 0
            self.stats.row_steps += decoding
            self._compute(0, list(self.rows))

    def _compute(self, first: int, rows: list[DecodedRow]) -> None:
        """Compute the pending tokens of the rows in the slots from `first` on, and draw the next ones."""
        self._advance(first, rows, self._run(rows, first))

    def _run(self, rows: list[DecodedRow], first: int) -> Tensor:
        """One pass over all pending tokens; logits [rows, V] after each row's last."""
        fresh = [len(row.pending) for row in rows if not row.drawn]
        self.stats.prefill_computed += sum(fresh)
        self.stats.prefill_saved -= sum(fresh)
        if not self.forward.ragged:
            self.stats.prefill_padded += len(fresh) * max(fresh, default=0) - sum(fresh)
        for slot, row in enumerate(rows, first):
            piece = self.limits.prefill_tokens
            while self.forward.shares and len(row.pending) > piece:  # bounds the memory of its attention
                self.forward.reserve(max(slot + 1, len(self.rows)), len(row.ids) + piece)
                self.forward.run([row.pending[:piece]], [len(row.ids)], slot)
                row.ids, row.pending = row.ids + row.pending[:piece], row.pending[piece:]
        new, starts = [row.pending for row in rows], [len(row.ids) for row in rows]
        longest = max(start + len(tokens) for start, tokens in zip(starts, new, strict=True))
        self.forward.reserve(max(first + len(rows), len(self.rows)), longest)
        logits = self.forward.run(new, starts, first)
        for row in rows:
            row.ids, row.drawn = row.ids + row.pending, True
        return logits

    def _advance(self, first: int, rows: list[DecodedRow], logits: Tensor) -> None:
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
        forks: list[tuple[int, DecodedRow]] = []
        for i, row in enumerate(rows):
            split = self._split(first + i, row)
            if not split:
                ended.append(first + i)
            for j, (token, members) in enumerate(split.items()):
                if j == 0:
                    row.pending, row.members = [token], members
                else:
                    forks.append(
                        (first + i, DecodedRow(list(row.ids), members, row.version, [token], drawn=True))
                    )
        self._fork(forks, ended)
        self._remove(ended)

    def _split(self, slot: int, row: DecodedRow) -> dict[int, list[Request]]:
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

    def _park(self, slot: int, row: DecodedRow, holders: list[Holder]) -> None:
        """Keep the cache of a finished turn for the sessions' next one."""
        assert self.store is not None
        store = self.store
        node = self.prefixes.insert(tuple(row.ids), lambda start, end: store.read(slot, start, end))
        for holder in holders:
            self.prefixes.hold(node)
            self.release(holder)
            holder.node = node

    def _fork(self, forks: list[tuple[int, DecodedRow]], ended: list[int]) -> None:
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

    def drop_cancelled(self) -> None:
        """Forget requests that nobody waits for."""
        self.waiting = [request for request in self.waiting if not request.cancelled]
        empty = []
        for slot, row in enumerate(self.rows):
            row.members = [member for member in row.members if not member.cancelled]
            if not row.members:
                empty.append(slot)
        self._remove(empty)
