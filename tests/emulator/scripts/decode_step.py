"""Captures one decode step of a small model with Qwen3's architecture, replays it, and prints times
and tokens.

    python tests/emulator/scripts/decode_step.py [batch ...]

Prints the times of two replays in milliseconds: with updates of attention lengths, and without
updates.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from dist_aclgraph.device import emulator

emulator.load({"strict": False})
import torch  # noqa: E402
import torch_npu  # noqa: E402
from torch.nn.functional import embedding, linear  # noqa: E402

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 8, 256, 4, 2, 64, 768, 8192
BLOCK, CONTEXT = 128, 128
SPLIT = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]


def matrix(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) / columns**0.5).npu()


class Model:
    def __init__(self, batch: int) -> None:
        self.embedding, self.head = matrix(VOCABULARY, HIDDEN), matrix(VOCABULARY, HIDDEN)
        self.norm = torch.ones(HIDDEN).npu()
        self.head_norm = torch.ones(HEAD_DIM).npu()
        self.layers = [
            {
                "qkv": matrix(sum(SPLIT), HIDDEN),
                "out": matrix(HIDDEN, HEADS * HEAD_DIM),
                "gate_up": matrix(2 * INNER, HIDDEN),
                "down": matrix(HIDDEN, INNER),
                "keys": torch.randn(batch, BLOCK, KV_HEADS, HEAD_DIM).npu(),
                "values": torch.randn(batch, BLOCK, KV_HEADS, HEAD_DIM).npu(),
            }
            for _ in range(LAYERS)
        ]
        self.tokens = torch.zeros(batch, dtype=torch.long).npu()
        self.slots = (torch.arange(batch, dtype=torch.int32) * BLOCK + CONTEXT - 1).npu()
        self.block_table = torch.arange(batch, dtype=torch.int32).view(-1, 1).npu()
        angles = torch.full((1, batch, 1, HEAD_DIM), 0.3)
        self.cos, self.sin = angles.cos().npu(), angles.sin().npu()
        self.batch = batch

    def forward(self, lengths: list[int]) -> torch.Tensor:
        n = self.batch
        x = embedding(self.tokens, self.embedding)
        h = torch_npu.npu_rms_norm(x, self.norm, 1e-6)[0]
        for p in self.layers:
            q, k, v = linear(h, p["qkv"]).split(SPLIT, -1)
            q = torch_npu.npu_rms_norm(q.reshape(1, n, HEADS, HEAD_DIM), self.head_norm, 1e-6)[0]
            k = torch_npu.npu_rms_norm(k.reshape(1, n, KV_HEADS, HEAD_DIM), self.head_norm, 1e-6)[0]
            q = torch_npu.npu_rotary_mul(q, self.cos, self.sin)[0]
            k = torch_npu.npu_rotary_mul(k, self.cos, self.sin)[0]
            torch_npu.npu_scatter_pa_kv_cache(
                k,
                v.reshape(n, KV_HEADS, HEAD_DIM).contiguous(),
                p["keys"],
                p["values"],
                self.slots,
                cache_mode="Norm",
            )
            attended = torch_npu.npu_fused_infer_attention_score(
                q,
                p["keys"].view(n, BLOCK, -1),
                p["values"].view(n, BLOCK, -1),
                actual_seq_lengths=list(range(1, n + 1)),
                actual_seq_lengths_kv=lengths,
                block_table=self.block_table,
                num_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                scale=HEAD_DIM**-0.5,
                input_layout="TND",
                block_size=BLOCK,
            )[0]
            h, _, x = torch_npu.npu_add_rms_norm(
                linear(attended.view(n, -1), p["out"]), x, self.norm, 1e-6
            )
            h = linear(torch_npu.npu_swiglu(linear(h, p["gate_up"])), p["down"])
            h, _, x = torch_npu.npu_add_rms_norm(h, x, self.norm, 1e-6)
        return linear(h, self.head).argmax(-1)


def fast_ms(action, count: int = 60) -> float:
    """Return the 10th percentile of the times of ``count`` actions, in milliseconds. This
    percentile is close to the true time even on a busy machine.
    """
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[count // 10]


def main(batches: list[int]) -> None:
    torch.npu.set_device(0)
    torch.manual_seed(0)
    for batch in batches:
        model = Model(batch)
        lengths = [CONTEXT] * batch
        eager = model.forward(lengths)
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            captured = model.forward(lengths)

        def step() -> None:
            graph.replay()  # noqa: B023
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])  # noqa: B023
            torch.npu.synchronize()

        step()
        assert captured.cpu().tolist() == eager.cpu().tolist()
        eager_ms = fast_ms(lambda: (model.forward(lengths), torch.npu.synchronize()))  # noqa: B023
        plain = torch.npu.NPUGraph()
        with torch.npu.graph(plain):
            captured = model.forward(lengths)

        def replay() -> None:
            plain.replay()  # noqa: B023
            torch.npu.synchronize()

        print(
            f"batch {batch:3}: replay and update {fast_ms(step):6.2f} ms, "
            f"replay {fast_ms(replay):6.2f} ms, eager {eager_ms:6.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [1, 8, 32])
