"""Makes models/tiny-deepseek-v32: a DeepSeek V3.2 checkpoint, trained from models/tiny-deepseek.

The two stages are those in which DeepSeek trained V3.2 from V3.1: first only the indexers learn
to which keys the dense attention gives weight; then all weights are trained, while each query
attends to the keys that its indexer chooses.

The script uses a seed and no network; see ``tiny_chat.py``. With ``--evaluate`` it only measures
the existing checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import make_tiny_deepseek  # before transformers, because it keeps torch from loading torch_npu
import tiny_chat
import tokenizers
import torch
import transformers
from deepseek_training import Attention, DeepSeek, Shape, linear, load_tensors, rotate
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, scaled_dot_product_attention

DENSE = Path(__file__).parent / "tiny-deepseek"
# Less than the tokens of most conversations, so that the choice matters.
TOP_K, NUM_HEADS, HEAD_DIM = 64, 4, 128
WARM_UP: tiny_chat.Schedule = ((2, 400, 11, 256),)
V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": TOP_K,
    "index_n_heads": NUM_HEADS,
    "index_head_dim": HEAD_DIM,
}


class Indexer(nn.Module):
    """Scores each key for each query. Its inputs are detached: only ``SparseAttention.index_loss``
    trains it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rope_dim = shape.qk_rope_head_dim
        self.wq_b = linear(shape.q_lora_rank, NUM_HEADS * HEAD_DIM)
        self.wk = linear(shape.hidden_size, HEAD_DIM)
        self.k_norm = nn.LayerNorm(HEAD_DIM, eps=1e-6)
        self.weights_proj = linear(shape.hidden_size, NUM_HEADS)

    def forward(self, x: Tensor, latent: Tensor, turn: Tensor) -> Tensor:
        """Return scores [rows, queries, keys].

        Args:
            x: [rows, length, hidden]. latent: [rows, length, q_lora_rank], normalised.
        """
        q = self.wq_b(latent).unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.wk(x)).unsqueeze(1)
        scores = self._rotate(q, turn) @ self._rotate(k, turn).transpose(2, 3)
        weights = self.weights_proj(x).transpose(1, 2).unsqueeze(-1)
        return (scores.relu() * weights).sum(1) * (HEAD_DIM * NUM_HEADS) ** -0.5

    def _rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        """Rotate the first elements, the first half of them with the second half."""
        first, rest = x[..., : self.rope_dim], x[..., self.rope_dim :]
        pairs = first.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        turned = rotate(pairs, turn).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat([turned, rest], -1)


class SparseAttention(Attention):
    """Attention whose queries attend to the keys that an indexer chooses.

    Attributes:
        is_dense: whether queries attend to all keys, while the indexer learns.
        index_loss: distance of the indexer's distribution over keys from the attention's, in the
            last call.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.indexer = Indexer(shape)
        self.is_dense = False
        self.index_loss = torch.zeros(())

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        s, length = self.shape, x.shape[1]
        latent = self.q_a_layernorm(self.q_a_proj(x))
        scores = self.indexer(x.detach(), latent.detach(), turn).float()
        is_later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
        mask = torch.zeros_like(scores).masked_fill(is_later, -torch.inf)
        if not self.is_dense:
            chosen = scores.topk(min(TOP_K, length), -1).indices
            mask = torch.full_like(mask, -torch.inf).scatter(-1, chosen, 0.0) + mask
        q, k, v = self.heads(x, latent, turn)
        mask = mask.unsqueeze(1).to(q.dtype)
        with torch.no_grad():
            seen = (q @ k.transpose(2, 3) * s.qk_head_dim**-0.5 + mask).float().softmax(-1).mean(1)
        guess = log_softmax(scores.masked_fill(mask.squeeze(1) < 0, -torch.inf), -1)
        guess = guess.masked_fill(seen == 0, 0.0)
        self.index_loss = kl_div(guess, seen, reduction="sum") / (x.shape[0] * length)
        out = scaled_dot_product_attention(
            q, k, v.to(q.dtype), attn_mask=mask, scale=s.qk_head_dim**-0.5
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SparseDeepSeek(DeepSeek):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for layer in self.model["layers"]:
            layer.self_attn = SparseAttention(shape)

        self._attentions = [layer.self_attn for layer in self.model["layers"]]

    def attend_to_all(self, is_dense: bool) -> None:
        for attention in self._attentions:
            attention.is_dense = is_dense

    @property
    def index_loss(self) -> Tensor:
        """The sum of the layers' losses in the last call."""
        return torch.stack([attention.index_loss for attention in self._attentions]).sum()


def load(model: SparseDeepSeek, directory: Path) -> None:
    """Load a checkpoint; indexers that the checkpoint lacks keep their random weights."""
    new = {name: x for name, x in model.state_dict().items() if ".indexer." in name}
    load_tensors(model, new | load_file(directory / "model.safetensors"))


def main() -> None:
    args = tiny_chat.start(__doc__, "tiny-deepseek-v32")
    transformers.logging.set_verbosity_error()  # it does not know next-token modules
    tokenizer = tokenizers.Tokenizer.from_file(str(DENSE / "tokenizer.json"))
    model = SparseDeepSeek(Shape(vocab_size=tiny_chat.padded_vocab_size(tokenizer)))
    load(model, args.out if args.evaluate or args.polish else DENSE)
    batches = tiny_chat.Batches(tokenizer, seed=2)

    def index_loss(ids: Tensor, weights: Tensor) -> Tensor:
        model.eval()  # the gates keep the balance of their experts
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            model(ids)
        return model.index_loss

    def loss(ids: Tensor, weights: Tensor) -> Tensor:
        model.train()
        return make_tiny_deepseek.loss_of(model, ids, weights) + model.index_loss

    stages = [] if args.evaluate else [(loss, tiny_chat.POLISH, 1e-3)]
    if not (args.evaluate or args.polish):
        stages.insert(0, (index_loss, WARM_UP, 3e-3))
    for loss_of, schedule, rate in stages:
        model.attend_to_all(loss_of is index_loss)
        progress = tiny_chat.train(
            model, loss_of, batches, schedule, peak_rate=rate, scale=args.scale
        )
        for _ in progress:
            make_tiny_deepseek.save(model, tokenizer, args.out, V32)
            make_tiny_deepseek.evaluate(model, args.out, batches, 10)
    make_tiny_deepseek.evaluate(model, args.out, batches, 100)


if __name__ == "__main__":
    main()
