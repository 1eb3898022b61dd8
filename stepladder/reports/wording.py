"""Sentences that a run says as it goes and its report says again."""

from __future__ import annotations

NONE_BETTER = "no epoch was better; the weights are those the {} began with"
