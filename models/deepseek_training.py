"""A DeepSeek V3 in the form in which it is trained: latent attention, experts, next-token module.

Parameters have the names of a published checkpoint, except that one tensor contains all experts of
a layer; ``checkpoint_tensors`` splits it. All experts run on all tokens, because the experts are
tiny.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

BIAS_STEP = 1e-3  # change of the correction bias per step, which balances the experts' loads


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model, named as in config.json."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 320
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 3
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Norm(nn.RMSNorm):
    def __init__(self, width: int, shape: Shape) -> None:
        super().__init__(width, eps=shape.rms_norm_eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=0.02)
    return made


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads, hidden = shape.num_attention_heads, shape.hidden_size
        self.shape = shape
        self.q_a_proj = linear(hidden, shape.q_lora_rank)
        self.q_a_layernorm = Norm(shape.q_lora_rank, shape)
        self.q_b_proj = linear(shape.q_lora_rank, heads * shape.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, shape.kv_lora_rank + shape.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(shape.kv_lora_rank, shape)
        self.kv_b_proj = linear(
            shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        )
        self.o_proj = linear(heads * shape.v_head_dim, hidden)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """[rows, length, hidden]; ``turn`` is e^(i angle), [length, rope / 2] complex."""
        q, k, v = self.heads(x, self.q_a_layernorm(self.q_a_proj(x)), turn)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.shape.qk_head_dim**-0.5
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor, latent: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [rows, heads, length, dim].

        Args:
            latent: [rows, length, q_lora_rank], the normalised latents of queries.
        """
        s = self.shape
        heads = (x.shape[0], x.shape[1], s.num_attention_heads, -1)
        q = self.q_b_proj(latent).view(heads).transpose(1, 2)
        q_nope, q_rope = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(heads).transpose(1, 2)
        k_nope, v = kv.split([s.qk_nope_head_dim, s.v_head_dim], -1)
        k_rope = rotate(k_rope.unsqueeze(1), turn).expand(-1, s.num_attention_heads, -1, -1)
        q, k = torch.cat([q_nope, rotate(q_rope, turn)], -1), torch.cat([k_nope, k_rope], -1)
        return q, k, v


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dimension."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The gate computes sigmoid scores. The correction bias affects the choice of experts, but not
    their weights.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.n_routed_experts, shape.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] -> weights [n, experts], zero for those not chosen."""
        s = self.shape
        scores = (x @ self.weight.t()).sigmoid()
        biased = (scores + self.e_score_correction_bias).detach()
        groups = biased.unflatten(-1, (s.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(s.topk_group, -1).indices
        allowed = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0).bool()
        biased = groups.masked_fill(~allowed.unsqueeze(-1), 0.0).flatten(-2)
        chosen = biased.topk(s.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            load = mask.sum(0)
            self.e_score_correction_bias += BIAS_STEP * (load.mean() - load).sign()
        weights = scores * mask
        return s.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20)


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        num, hidden, width = shape.n_routed_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate = Gate(shape)
        self.gate_up = nn.Parameter(torch.randn(num, 2 * width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(num, hidden, width) * 0.02)
        self.shared_experts = Mlp(hidden, shape.n_shared_experts * width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        gate, up = torch.matmul(flat, self.gate_up.transpose(1, 2)).chunk(2, -1)
        h = silu(gate) * up * self.gate(flat).t().unsqueeze(-1)  # [experts, n, width]
        return torch.einsum("enw,ehw->nh", h, self.down).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape)
        is_dense = index < shape.first_k_dense_replace
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size) if is_dense else Experts(shape)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class NextTokenModule(Layer):
    """Predicts the token after the next token, from a hidden state and the next token.

    Embedding and head are shared with the main model; a checkpoint contains copies.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.num_hidden_layers)
        self.enorm = Norm(shape.hidden_size, shape)
        self.hnorm = Norm(shape.hidden_size, shape)
        self.eh_proj = linear(2 * shape.hidden_size, shape.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": Norm(shape.hidden_size, shape)})

    def predict(self, hidden: Tensor, embedded: Tensor, turn: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self.shared_head["norm"](self(x, turn))


class DeepSeek(nn.Module):
    """A decoder and its next-token module, as one module list like a checkpoint's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        layers: list[Layer] = [Layer(shape, i) for i in range(shape.num_hidden_layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList([*layers, NextTokenModule(shape)]),
                "norm": Norm(shape.hidden_size, shape),
            }
        )
        nn.init.normal_(self.model["embed_tokens"].weight, std=0.02)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, length] -> logits of the next tokens [rows, length, vocab], and of those after
        them [rows, length - 1, vocab].
        """
        s = self.shape
        turn = self._turn(ids.shape[1])
        embedded = self.model["embed_tokens"](ids)
        *layers, module = self.model["layers"]
        x = embedded
        for layer in layers:
            x = layer(x, turn)
        hidden = self.model["norm"](x)
        assert isinstance(module, NextTokenModule)
        further = module.predict(hidden[:, :-1], embedded[:, 1:], turn[:-1])
        assert s.vocab_size == self.lm_head.out_features
        return self.lm_head(hidden), self.lm_head(further)

    def _turn(self, length: int) -> Tensor:
        s = self.shape
        exponents = torch.arange(0, s.qk_rope_head_dim, 2) / s.qk_rope_head_dim
        angles = torch.outer(torch.arange(length).float(), s.rope_theta**-exponents)
        return torch.polar(torch.ones_like(angles), angles)


def checkpoint_tensors(model: DeepSeek) -> dict[str, Tensor]:
    """Return the weights by the names of a published checkpoint, in bfloat16, except the gates'
    bias.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up":
            for index, (gate, up) in enumerate(part.chunk(2, 0) for part in tensor):
                tensors[f"{prefix}.experts.{index}.gate_proj.weight"] = gate
                tensors[f"{prefix}.experts.{index}.up_proj.weight"] = up
        elif last == "down":
            for index, part in enumerate(tensor):
                tensors[f"{prefix}.experts.{index}.down_proj.weight"] = part
        else:
            tensors[name] = tensor
    module = f"model.layers.{model.shape.num_hidden_layers}"
    tensors[f"{module}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{module}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return {
        name: tensor.float().clone() if name.endswith("bias") else tensor.bfloat16().clone()
        for name, tensor in tensors.items()
    }


def load_tensors(model: DeepSeek, tensors: dict[str, Tensor]) -> None:
    """Load tensors that ``checkpoint_tensors`` returned."""
    state = {}
    for name in model.state_dict():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up", "down"):
            state[name] = tensors[name].float()
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up" else ("down_proj",)
        state[name] = torch.stack(
            [
                torch.cat([tensors[f"{prefix}.experts.{i}.{part}.weight"] for part in parts])
                for i in range(model.shape.n_routed_experts)
            ]
        ).float()
    model.load_state_dict(state)
