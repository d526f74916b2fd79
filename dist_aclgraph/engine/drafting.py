"""Multi-token prediction: drafts that the next step verifies, all on the device.

A step gives the target model each request's last token and its k drafts, and samples a token at
every one of these places, as it would without drafts. The drafts that equal what was sampled before
them were right; the token after the last right one comes for free. So what is sampled never depends
on the drafts: greedy or random, with or without, a request gets the same tokens. (For drafts that
are chosen without chance this is rejection sampling: a draft passes with the probability that the
target gives it, and otherwise the target's other tokens are left.)

Then the next-token module runs over the same places with the tokens that were sampled, and from the
last right place on it proposes k tokens, one after another. How many drafts passed is known to the
device alone, and nothing on the host may depend on it. So every request keeps k + 1 places in each
of these runs, of which those from the last right place on write to the cache; causality keeps the
places after it from being seen, and no place reads memory that was never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dist_aclgraph.context.shards import PADDING_SLOT
from dist_aclgraph.graphs.device_step import DraftInputs
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.steps.references import first_last


class DraftPass(NamedTuple):
    """What the next-token module runs over in one iteration of drafting.

    Attributes:
        iteration: from 0; KV lengths are longer by that.
        token_ids, positions: [n] int32.
        slots: [n] int32, negative is padding.
        written: [n] int32, slots of what is written to the cache, -1 is not.
        hidden: [n, hidden], of the places before.
    """

    iteration: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    written: Tensor
    hidden: Tensor


RunModule = Callable[[DraftPass], Tensor]  # to [n, hidden]
Collect = Callable[[Tensor, Tensor], Tensor]  # rows of [n, hidden] at places, whoever has them


def rows_at(hidden: Tensor, places: Tensor) -> Tensor:
    """Return the rows of [n, hidden] at places, all of which this rank runs."""
    return hidden.index_select(0, places)


class Drafter:
    """Owns the drafts of all rows, and their last tokens.

    No view of what it reads begins in the middle of a row: operators load blocks of 32 bytes.

    Attributes:
        tokens: whose latest ones drafts and last are, of which the last row is spare.
        drafts: [max_rows + 1, k] int32.
        last: [max_rows + 1] int32.
        passed: [max_rows + 1] int32, drafts that passed in the last step; none of the spare row.
    """

    def __init__(self, k: int, max_rows: int, vocab_size: int, device: torch.device) -> None:
        num_rows = max_rows + 1
        first = first_last(k, num_rows)
        self.tokens = TokenTable(vocab_size, first + num_rows, device)
        self.drafts = self.tokens.latest[: num_rows * k].view(num_rows, k)
        self.last = self.tokens.latest[first:]
        self.passed = torch.zeros(num_rows, dtype=torch.int32, device=device)

    @property
    def k(self) -> int:
        return self.drafts.shape[1]

    def count(self, sampled: Tensor, inputs: DraftInputs) -> Tensor:
        """Return how many drafts of each request have passed, [num_reqs] int32.

        Args:
            sampled: [num_reqs, k + 1] int32, at the places.
        """
        if not len(sampled):
            return sampled.new_empty(0)
        return count_accepted(sampled, self.drafts.index_select(0, inputs.rows), inputs.most)

    def propose(
        self,
        logits: Callable[[Tensor], Tensor],
        run: RunModule,
        next_tokens: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        hidden: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        inputs: DraftInputs,
        collect: Collect = rows_at,
    ) -> None:
        """Draft what follows.

        Args:
            collect: where the step has other tokens than places, finds the hidden states of these.
            logits: of the module's results: [num_reqs, hidden] -> [num_reqs, vocab].
            positions, slots: [n] int32, of the step.
            next_tokens: [n] int32, the token after each, what was sampled at the places filled in;
                None where every token is a place, in order.
            hidden: [n, hidden], the target model's.
            sampled: [num_reqs, k + 1] int32, at the places.
            accepted: [num_reqs] int32, as from ``count``.
        """
        num_reqs, num_places = sampled.shape
        if num_reqs == 0:  # chunks of prompts only
            assert next_tokens is not None
            run(DraftPass(0, next_tokens, positions, slots, slots, hidden))
            return
        chosen = sampled.reshape(-1) if next_tokens is None else next_tokens
        hidden = run(DraftPass(0, chosen, positions, slots, slots, hidden))
        if next_tokens is not None:
            hidden = collect(hidden, inputs.places)
        first = torch.arange(num_reqs, dtype=torch.int32, device=sampled.device) * num_places
        last_right = first + accepted
        proposed = []
        for iteration in range(1, self.k + 1):
            best = logits(hidden.index_select(0, last_right)).argmax(-1).int()
            proposed.append(best)
            if iteration == self.k:
                break
            columns = torch.arange(num_places, dtype=torch.int32, device=sampled.device)
            goes_on = columns >= accepted.unsqueeze(1)  # [num_reqs, k + 1]
            ahead = inputs.slots.index_select(1, columns + iteration)
            hidden = run(
                DraftPass(
                    iteration,
                    best.unsqueeze(1).expand(-1, num_places).reshape(-1),
                    (inputs.positions + iteration).view(-1),
                    inputs.slots[:, :num_places].reshape(-1),
                    torch.where(goes_on, ahead, PADDING_SLOT).view(-1),
                    hidden,
                )
            )
        rows = inputs.rows.long()
        self.drafts.index_copy_(0, rows, torch.stack(proposed, 1))
        self.last.index_copy_(0, rows, sampled.reshape(-1).index_select(0, last_right))
        self.passed.index_copy_(0, rows, accepted)


def count_accepted(sampled: Tensor, drafted: Tensor, most: Tensor) -> Tensor:
    """Count the drafts before the first wrong one.

    Args:
        sampled: [num_reqs, k + 1] int32, what the target chose at each place.
        drafted: [num_reqs, k] int32.
        most: [num_reqs] int32.

    Returns:
        [num_reqs] int32, from 0 to k, and not above ``most``.
    """
    k = drafted.shape[1]
    right = (sampled[:, :-1] == drafted).int()
    # The least index of a wrong one; those of right ones count as larger than any.
    index = torch.arange(k, dtype=torch.int32, device=sampled.device)
    return torch.minimum((index + right * k).amin(1), most)
