"""The child process that runs a probe's questions on a fake device. The fake device is the emulator
with some artificial answers.
"""

import os
import signal
import time

from dist_aclgraph.probe import child

# PLANTED contains the artificial answers by question. STREAMS is also set in the emulator's
# configuration.
STREAMS = 512
PLANTED = {
    "facts.streams": f"{STREAMS - 2} streams",  # opening a device uses two streams
    "operators.swiglu": "refused",
    "operators.rms_norm": "different",
    "operators.rotary_mul": "no answer",
    "operators.grouped_matmul": "missing",
    "operators.dynamic_quant": "the process died",
    "operators.int32_wraps": "does not wrap",
    "memory.nan_behind_last_key": "does not reach the result",
    "rules.attention.dim_272": "accepted",
    "graphs.update_us": None,  # its answer is a time, which the tests do not check
    "graphs.query_inside": "accepted, graph valid",
    "collectives.all_gather": "rank 0: equal; rank 1: different",
}


def plant() -> None:
    import torch
    import torch_npu

    def refuse(x):
        raise RuntimeError("aclnnSwiGlu: not on this chip, error code is 161002")

    norm = torch_npu.npu_rms_norm

    def norm_with_error(*arguments):
        out, rstd = norm(*arguments)
        return out * 1.1, rstd

    def hang(*arguments):
        time.sleep(3600)

    def die(x):
        os.kill(os.getpid(), signal.SIGKILL)

    attention = torch_npu.npu_fused_infer_attention_score

    def other_attention(query, **options):
        if query.shape[-1] == 272:
            return torch.zeros_like(query), None
        out, lse = attention(query, **options)
        if options["actual_seq_lengths_kv"] == [20]:
            out = out.nan_to_num()
        return out, lse

    multiply = torch.mul

    def saturating(a, b, **options):
        if a.dtype != torch.int32:
            return multiply(a, b, **options)
        limits = torch.iinfo(torch.int32)
        return (a.cpu().long() * b.cpu().long()).clamp(limits.min, limits.max).int().npu()

    packet = torch.ops.npu.npu_fused_infer_attention_score
    launch = packet.out  # captured calls that are updated become slow; calls of version 2 stay fast

    def slow_launch(**arguments):
        time.sleep(0.005)
        launch(**arguments)

    gather = torch.distributed.all_gather_into_tensor

    def wrong_gather(out, part):
        gather(out, part)
        if torch.distributed.get_rank() == 1:
            out.zero_()

    torch_npu.npu_swiglu = refuse
    torch_npu.npu_rms_norm = norm_with_error
    torch_npu.npu_rotary_mul = hang
    del torch_npu.npu_grouped_matmul
    torch_npu.npu_dynamic_quant = die
    torch_npu.npu_fused_infer_attention_score = other_attention
    torch.mul = saturating
    packet.out = slow_launch
    torch.npu.Stream.query = lambda stream: True
    torch.distributed.all_gather_into_tensor = wrong_gather


def main(task, parent):
    child.main(task, parent, plant)
