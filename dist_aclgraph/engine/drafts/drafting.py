"""Multi-token prediction: on the device, a module proposes drafts, and the next step verifies them.

In a step, the target model runs each request's last token and its k drafts, and a token is sampled
at each of these places. A draft is accepted if all earlier drafts are accepted, and if the draft
equals the token that was sampled at the place before the draft. After the accepted drafts, the
request gets one more token: the token that was sampled at the last accepted place. So all of the
request's tokens are sampled from the target model. With any sampling parameters, the request gets
the same tokens as without drafts. (For deterministic drafts, this is rejection sampling: the
probability that a draft is accepted is the draft's probability under the target model. Instead of a
rejected draft, the request gets the token that was sampled from the target model.)

Then the next-token module runs on the same places, with the sampled tokens as inputs. The module
proposes k tokens, one after another. The first proposed token follows the token that was sampled at
the last accepted place. Only the device knows the number of accepted drafts, and no work of the
host may depend on this number. So each run of the module contains all k + 1 places of every
request. Only the last accepted place and the later places write to the cache. The causal mask hides
the places after the last accepted place. No place attends to a slot that was never written.
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
    """The inputs of the next-token module in one iteration of drafting.

    Attributes:
        iteration: number of the iteration, from 0. In iteration i, KV lengths are larger by i than
            in iteration 0.
        token_ids, positions: [n] int32.
        slots: [n] int32, slots of the tokens; the slot of a padding token is negative.
        written: [n] int32, the slots to which KV is written; -1 for a token whose KV is not
            written.
        hidden: [n, hidden], for each token, the hidden state of the token before it.
    """

    iteration: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    written: Tensor
    hidden: Tensor


RunModule = Callable[[DraftPass], Tensor]  # returns [n, hidden]
# Arguments: hidden states [n, hidden], and places, which are indices of tokens. Returns the hidden
# states of these tokens, even if another rank runs the tokens.
Collect = Callable[[Tensor, Tensor], Tensor]


def rows_at(hidden: Tensor, places: Tensor) -> Tensor:
    """Return the rows of ``hidden`` at the indices ``places``. This rank must run all of these
    tokens.
    """
    return hidden.index_select(0, places)


class Drafter:
    """Owns the drafts and the last token of each row.

    The views ``drafts`` and ``last`` begin at aligned addresses, because operators load blocks of
    32 bytes.

    Attributes:
        tokens: the table of the latest tokens; ``drafts`` and ``last`` are views of it. The last
            row of each view is a spare row for padding.
        drafts: [max_rows + 1, k] int32, the drafts of each row.
        last: [max_rows + 1] int32, the last token of each row.
        passed: [max_rows + 1] int32, number of each row's drafts that the last step accepted; 0 in
            the spare row.
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
        """Return the number of accepted drafts of each request, [num_reqs] int32.

        Args:
            sampled: [num_reqs, k + 1] int32, for each request, the tokens that were sampled after
                its last token and after each of its drafts.
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
        """Propose the next k tokens of each request as drafts.

        Args:
            collect: returns the hidden states of the places (``Collect``). A place is a token after
                which the step samples. Not called if the step runs only places.
            logits: maps the module's results, [num_reqs, hidden], to logits, [num_reqs, vocab].
            positions, slots: [n] int32, positions and slots of the step's tokens.
            next_tokens: [n] int32, for each token of the step, the request's next token. The next
                token of a place is the token that was sampled at the place. None if the step runs
                only places, in their order.
            hidden: [n, hidden], hidden states of the target model.
            sampled: [num_reqs, k + 1] int32, for each request, the tokens that were sampled after
                its last token and after each of its drafts.
            accepted: [num_reqs] int32, number of accepted drafts of each request.
        """
        num_reqs, num_places = sampled.shape
        if num_reqs == 0:  # no request samples, because all prompts are unfinished
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
    """Count the drafts before the first rejected draft.

    Args:
        sampled: [num_reqs, k + 1] int32, for each request, the tokens that were sampled after its
            last token and after each of its drafts.
        drafted: [num_reqs, k] int32, the drafts of each request.
        most: [num_reqs] int32, for each request, the maximum number of accepted drafts.

    Returns:
        [num_reqs] int32, number of accepted drafts of each request, at most ``most``.
    """
    k = drafted.shape[1]
    right = (sampled[:, :-1] == drafted).int()
    # The result is the smallest index of a wrong draft; k if all drafts are right. So k is added to
    # the indices of right drafts before the minimum is computed.
    index = torch.arange(k, dtype=torch.int32, device=sampled.device)
    return torch.minimum((index + right * k).amin(1), most)
