"""The modelled time of operators is compared with values that were computed by hand from the
formulas of docs/develop/device-time.md.
"""

import json
import math
import re
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "develop" / "device-time.md"

HELPERS = """
import torch_npu
npu = {"device": "npu", "dtype": torch.bfloat16}
ints = {"device": "npu", "dtype": torch.int32}
main, side = torch.npu.current_stream(), torch.npu.Stream()
gate = torch.npu.ExternalEvent()
results = {}
def measure(name, operator):
    "Microseconds of one call, which is queued before it may begin."
    operator()
    torch.npu.synchronize()
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    gate.wait(main)
    gate.reset(main)
    first.record()
    operator()
    last.record()
    gate.record(side)
    torch.npu.synchronize()
    results[name] = first.elapsed_time(last) * 1e3
"""


@pytest.fixture
def microseconds(run_script):
    """Return a function that runs code with calls of ``measure``, and returns their times in
    microseconds.

    The times do not contain the gaps between kernels.
    """

    def run(code, **settings):
        settings = {"kernels": "timed", "cann": "9.0.0", "hbm_mb": 65536} | settings
        code = HELPERS + textwrap.dedent(code) + "\nprint('JSON', json.dumps(results))"
        status, output = run_script(code, **settings)
        assert status == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("JSON ")]
        return {name: us - 2 for name, us in json.loads(line[5:]).items()}

    return run


PRODUCTS = """
def product(m, n, k, **options):
    a, b, out = (torch.empty(*size, **npu | options) for size in ((m, k), (k, n), (m, n)))
    return lambda: torch.mm(a, b, out=out)
measure("decode", product(32, 4096, 4096))
measure("prompt", product(4096, 4096, 4096))
measure("between", product(2048, 2048, 512))
measure("tiny", product(1, 64, 64))
x, w = (torch.zeros(*s, device="npu", dtype=torch.int8) for s in ((4096, 4096), (4096, 4096)))
scale = torch.ones(4096, device="npu")
measure("int8", lambda: torch_npu.npu_quant_matmul(
    x, w, scale, pertoken_scale=scale, output_dtype=torch.bfloat16))
"""


@pytest.mark.parametrize(
    ("soc", "bf16", "int8", "hbm"),
    [
        ("Ascend910B1", 364, 727, 1.6),
        ("Ascend910B4", 246, 492, 0.8),
        ("Ascend910_9391", 364, 727, 1.6),
    ],
)
def test_products(microseconds, soc, bf16, int8, hbm):
    us = microseconds(PRODUCTS, soc=soc)
    weights = 2 * (4096 * 4096 + 2 * 32 * 4096) / (hbm * 0.8) / 1e6
    assert us["decode"] == pytest.approx(weights, abs=0.01)
    assert us["prompt"] == pytest.approx(2 * 4096**3 / (bf16 * 0.85) / 1e6, abs=0.01)
    share = 0.28 + (math.log2((2048 * 2048 * 512) ** (1 / 3)) - 10) * (0.70 - 0.28)
    assert us["between"] == pytest.approx(2 * 2048 * 2048 * 512 / (bf16 * share) / 1e6, abs=0.01)
    assert us["tiny"] == pytest.approx(5)
    assert us["int8"] == pytest.approx(2 * 4096**3 / (int8 * 0.78) / 1e6, abs=0.01)


ATTENTION = """
heads, kv_heads, dim, block = 32, 8, 128, 128
def attention(rows, lengths):
    pages = sum(-(-n // block) for n in lengths)
    cache = torch.empty(pages, block, kv_heads * dim, **npu)
    columns = max(-(-n // block) for n in lengths)
    table = torch.zeros(len(lengths), columns, **ints)
    query = torch.empty(sum(rows), heads, dim, **npu)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    ends = torch.tensor(rows).cumsum(0).tolist()
    return lambda: torch_npu.npu_fused_infer_attention_score(
        query, cache, cache, actual_seq_lengths=ends, actual_seq_lengths_kv=lengths,
        block_table=table, num_heads=heads, num_key_value_heads=kv_heads, scale=0.1,
        input_layout="TND", block_size=block, sparse_mode=3, atten_mask=mask)
measure("short", attention([1], [100]))
measure("decode", attention([1] * 32, [4096] * 32))
measure("prompt", attention([4096], [4096]))
measure("short prompt", attention([100], [100]))
"""


def test_attention(microseconds):
    us = microseconds(ATTENTION)
    kv_bytes = 32 * 4096 * 8 * 256 * 2 + 32 * 32 * 256 * 2
    pairs = 4096 * 4097 / 2
    assert us["short"] == pytest.approx(15) and us["short prompt"] == pytest.approx(45)
    assert us["decode"] == pytest.approx(kv_bytes / (1.6 * 0.7) / 1e6, abs=0.01)
    assert us["prompt"] == pytest.approx(2 * 32 * pairs * 256 / (364 * 0.5) / 1e6, abs=0.01)


OTHERS = """
x, out = torch.empty(1024, 4096, **npu), torch.empty(1024, 4096, **npu)
measure("add", lambda: torch.add(x, x, out=out))
measure("in place", lambda: out.mul_(2.0))
table, index = torch.empty(151936, 1024, **npu), torch.zeros(8192, **ints)
measure("embedding", lambda: torch.nn.functional.embedding(index, table))
logits = torch.empty(32, 151936, device="npu")
measure("argmax", lambda: logits.argmax(-1))
whole = torch.zeros(128, device="npu", dtype=torch.int64)
measure("ai cpu", lambda: whole.cumsum(0))
host = torch.empty(1 << 20, dtype=torch.int32, pin_memory=True)
device = torch.empty(1 << 20, **ints)
measure("upload", lambda: device.copy_(host, non_blocking=True))
measure("copy", lambda: out.copy_(x))
"""


def test_the_time_of_memory_bound_operators_follows_from_their_bytes(microseconds):
    us = microseconds(OTHERS)
    matrix = 1024 * 4096 * 2
    assert us["add"] == pytest.approx(3 * matrix / 0.96 / 1e6, abs=0.01)
    assert us["in place"] == pytest.approx(2 * matrix / 0.96 / 1e6, abs=0.01)
    rows = 8192 * 1024 * 2
    assert us["embedding"] == pytest.approx((2 * rows + 4 * 8192) / 0.96 / 1e6, rel=0.01)
    assert us["argmax"] == pytest.approx(32 * 151936 * 4 / 0.112 / 1e6, rel=0.01)
    assert us["ai cpu"] == pytest.approx(35 + 2 * 128 * 8 / 1e3, abs=0.01)
    assert us["upload"] == pytest.approx(10 + (4 << 20) / 20e3 - 2, abs=0.01)
    assert us["copy"] == pytest.approx(2 * matrix / 0.96 / 1e6, abs=0.01)


def test_weights_cost_time_and_no_memory(microseconds):
    us = microseconds("""
        import resource
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        weight = torch.zeros(65536, 262144, **npu)  # 32 GiB
        x = torch.ones(8, 65536, **npu)
        weight.normal_(), weight.fill_(1)
        measure("product", lambda: x @ weight)
        results["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    """)
    assert us["product"] == pytest.approx(65536 * 262144 * 2 / 1.28 / 1e6, rel=0.01)
    assert us["MiB"] < 512


def test_rates_are_replaced_by_a_file(microseconds, tmp_path):
    path = tmp_path / "measured.yaml"
    path.write_text("matmul_us: 7.5\nhbm_tb_s: 1\n")
    us = microseconds(PRODUCTS, rates=str(path))
    assert us["tiny"] == pytest.approx(7.5)
    assert us["decode"] == pytest.approx(2 * (4096 * 4096 + 2 * 32 * 4096) / 0.8 / 1e6, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matmul: 3", "rate.matmul=3: there is no such rate"),
        ("gap_us: -1", "rate.gap_us=-1: want a number of 0 or more"),
        ("gap_us: soon", "rate.gap_us=soon: want a number of 0 or more"),
        ("- 3", "must be names with numbers"),
        ("a: b: c", "cannot read the rates"),
    ],
)
def test_wrong_files_of_rates_are_refused(run_script, tmp_path, text, message):
    path = tmp_path / "measured.yaml"
    path.write_text(text)
    status, output = run_script("", kernels="timed", rates=str(path))
    assert status != 0 and message in output, output


@pytest.mark.parametrize(("soc", "column"), [("Ascend910B1", 1), ("Ascend910_9391", 2)])
def test_the_page_tells_the_rates_in_force(run_script, soc, column):
    status, output = run_script(
        "print('JSON', json.dumps(emulator.rates()))", kernels="timed", soc=soc
    )
    assert status == 0, output
    rates = json.loads(output[output.index("JSON ") + 5 :])
    table = {
        cells[0].strip("`"): float(cells[column])
        for cells in re.findall(r"^\| (`\w+`) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.M)
    }
    peaks = {"bf16_tflops": 364, "int8_tflops": 727, "hbm_tb_s": 1.6}
    assert rates == table | peaks
