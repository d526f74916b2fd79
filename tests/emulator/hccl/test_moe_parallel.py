"""Experts on several ranks: dispatch and combine over HCCL give the sum over all chosen experts."""

import pytest

from tests.slow import slow

SETUP = """
dist.init_process_group("hccl")
n = dist.get_world_size()
own = dist.new_group(list(range(n)))
group = own._get_backend(torch.device("npu")).get_hccl_comm_name(rank)  # makes the communicator
"""
LAYER = """
EXPERTS, K, H = 8, 3, 64
local = EXPERTS // n
torch.manual_seed(0)
factors = torch.randn(EXPERTS)

A2 = torch.npu.get_device_name().startswith("Ascend910B")

class Layer:
    def __init__(self, **options):
        self.domain = (group, n, rank, EXPERTS)
        self.options = options
        self.factors = factors[rank * local : (rank + 1) * local].half().npu()

    def __call__(self, x, ids, scales, mask=None):
        options = {"x_active_mask": mask, **self.options}
        rows, _, origins, tokens, counts, tp_counts, row_scales = (
            torch_npu.npu_moe_distribute_dispatch_v2(
                x, ids, *self.domain, expert_token_nums_type=0,
                expert_scales=scales if A2 else None, **options
            )
        )
        # The expert multiplies by its factor; rows beyond the last are left as they are.
        place = torch.arange(rows.shape[0], device="npu")[:, None]
        expert = (place >= tokens[None, :]).sum(1).clamp(max=local - 1)
        out = torch_npu.npu_moe_distribute_combine_v2(
            rows * self.factors[expert][:, None], ids, origins, counts, scales, *self.domain,
            expand_scales=row_scales if A2 else None, **options,
        )
        return out, tokens

def batch(rows, seed):
    g = torch.Generator().manual_seed(seed * 100 + rank)
    x = torch.randn(rows, H, generator=g).half()
    ids = torch.rand(rows, EXPERTS, generator=g).topk(K).indices.int()
    return x, ids, torch.rand(rows, K, generator=g)

def check(out, x, ids, scales):
    want = x.float() * (factors[ids.long()] * scales).sum(1, keepdim=True)
    assert torch.allclose(out.cpu().float(), want, atol=2e-2, rtol=1e-2)

def to_device(*tensors):
    return [t.npu() for t in tensors]

def refused(rule, x=None, ids=None, domain=None, **options):
    given = batch(4, 0)
    x = given[0] if x is None else x
    ids = given[1] if ids is None else ids
    try:
        torch_npu.npu_moe_distribute_dispatch_v2(
            x.npu(), ids.npu(), *(domain or (group, n, rank, EXPERTS)), **options
        )
    except RuntimeError as error:
        assert "aclnnMoeDistributeDispatchV2: " + rule in str(error), error
    else:
        raise AssertionError(rule)
"""
SETUP += LAYER


def assert_all_pass(results):
    for rank, (status, output) in enumerate(results):
        assert status == 0, f"rank {rank}:\n{output}"


@pytest.mark.parametrize("ranks,hosts", [(2, "a"), (4, "a"), (4, "aabb")])
def test_experts_of_all_ranks(run_ranks, ranks, hosts):
    results = run_ranks(
        SETUP
        + """
layer = Layer()
for seed in range(3):
    given = batch(6, seed)
    out, tokens = layer(*to_device(*given))
    check(out, *given)
    everyone = [torch.empty(6, K, dtype=torch.int32, device="npu") for _ in range(n)]
    dist.all_gather(everyone, given[1].npu())
    counts = torch.cat(everyone).cpu().flatten().long().bincount(minlength=EXPERTS)
    assert tokens.tolist() == counts[rank * local : (rank + 1) * local].cumsum(0).tolist()
""",
        ranks,
        devices=ranks,
    )
    assert_all_pass(results)


def test_batches_of_different_sizes_and_masked_tokens(run_ranks):
    results = run_ranks(
        SETUP
        + """
given = batch(2 + 3 * rank, 1)
out, _ = Layer(global_bs=5 * n)(*to_device(*given))
check(out, *given)

given, live = batch(6, 2), 2 + rank
mask = torch.arange(6) < live
out, tokens = Layer()(*to_device(*given), mask=mask.npu())
check(out[:live], *(t[:live] for t in given))

# A mask may be strided.
wide = torch.zeros(6, 2 * K, dtype=torch.bool)
wide[:live, ::2] = True
for strided in (wide.npu()[:, 0], wide.npu()[:, ::2]):
    out, _ = Layer()(*to_device(*given), mask=strided)
    check(out[:live], *(t[:live] for t in given))
total = tokens[-1:].clone()
dist.all_reduce(total)
assert total.item() == K * sum(2 + r for r in range(n))
""",
        2,
        devices=2,
    )
    assert_all_pass(results)


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_a_captured_layer_sends_what_it_is_given_at_replay(run_ranks):
    results = run_ranks(
        SETUP
        + """
layer = Layer()
x, ids, scales = to_device(*batch(6, 0))
layer(x, ids, scales)
torch.npu.synchronize()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    out, _ = layer(x, ids, scales)
for seed in range(1, 4):
    given = batch(6, seed)
    for mine, new in zip((x, ids, scales), given):
        mine.copy_(new)
    graph.replay()
    check(out, *given)
""",
        2,
        devices=2,
    )
    assert_all_pass(results)


def test_arguments_that_documents_exclude_are_refused(run_ranks):
    results = run_ranks(
        SETUP
        + """
refused("x must be float16 or bfloat16", x=torch.zeros(4, H))
refused("group_ep nobody has no rank", domain=("nobody", n, rank, EXPERTS))
refused("ep_world_size 4, but group_ep has 2", domain=(group, 4, rank, EXPERTS))
refused("moe_expert_num 7 is not a multiple", domain=(group, n, rank, 7))
refused("moe_expert_num 1026 is not 1 to 1024", domain=(group, n, rank, 1026))
refused("H 40 must be a multiple of 32", x=torch.zeros(4, 40).half())
refused("BS 257 is not 1 to 256", *batch(257, 0)[:2])
refused("quant_mode 2", quant_mode=2)
refused("global_bs 6 does not hold 4 rows", global_bs=6)
refused("comm_alg fullmesh_v1 is not one", comm_alg="fullmesh_v1")
refused("comm_alg hierarchy needs 16, 32 or 64 ranks, got 2", comm_alg="hierarchy")
refused("x_active_mask must be bool", x_active_mask=torch.ones(4).npu())

twice = torch.zeros(4, K, dtype=torch.int32)
try:
    torch_npu.npu_moe_distribute_dispatch_v2(
        batch(4, 0)[0].npu(), twice.npu(), group, n, rank, EXPERTS
    )
    torch.npu.synchronize()
except RuntimeError as error:
    assert "expert_ids has 0 twice in row 0" in str(error), error
else:
    raise AssertionError("twice")
os._exit(0)  # the device is stopped
""",
        2,
        devices=2,
    )
    assert_all_pass(results)


PADDING = """
given = batch(4, 0)
ids = given[1].clone()
ids[3] = torch.tensor({ids})
mask = torch.arange(4) < 3
try:
    Layer()(*to_device(given[0], ids, given[2]), mask=mask.npu())
    torch.npu.synchronize()
except RuntimeError as error:
    assert "expert_ids has {rule}" in str(error), error
else:
    raise AssertionError("taken")
os._exit(0)  # the device is stopped
"""


@pytest.mark.parametrize("ids,rule", [([-1, 0, 1], "-1 of 8 experts"), ([2, 0, 2], "2 twice")])
def test_experts_of_masked_rows_must_be_legal(run_ranks, ids, rule):
    code = SETUP + PADDING.replace("{ids}", str(ids)).replace("{rule}", rule)
    assert_all_pass(run_ranks(code, 2, devices=2, cann="9.0.0"))


def test_limits_depend_on_the_chip(run_ranks):
    results = run_ranks(
        SETUP
        + """
refused("H 64 is not 1024 to 8192")
wide = torch.zeros(4, 1024).half()
refused("expert_scales is for comm_alg hierarchy", x=wide, expert_scales=torch.ones(4, K).npu())
refused("comm_alg fullmesh is not one", x=wide, comm_alg="fullmesh")
H = 1024
given = batch(6, 0)
check(Layer(comm_alg="fullmesh_v1")(*to_device(*given))[0], *given)
limited = {"domain": (group, n, rank, 16), "comm_alg": "fullmesh_v2"}
refused("K 13 is not 1 to 12", x=wide, ids=torch.zeros(4, 13).int(), **limited)
refused("BS 257 is not 1 to 256", x=torch.zeros(257, 1024).half(), ids=torch.zeros(257, 3).int(),
        **limited)
""",
        2,
        devices=2,
        soc="Ascend910_9391",
        hccl_expansion="AICPU",
    )
    assert_all_pass(results)


def test_arguments_that_a_chip_or_a_release_excludes_are_refused(run_ranks):
    expansion = """
try:
    dist.init_process_group("hccl")
    dist.all_reduce(torch.ones(1).npu())
except RuntimeError as error:
    assert "HCCL_OP_EXPANSION_MODE HOST is not documented for Ascend910_9391" in str(error), error
else:
    raise AssertionError("an A3 took HOST")
store = dist.distributed_c10d._get_default_store()
store.set(f"refused {rank}", "")
if rank == 0:  # the others need its store
    store.wait(["refused 1"])
os._exit(0)
"""
    assert_all_pass(run_ranks(expansion, 2, devices=2, soc="Ascend910_9391"))
    old = 'refused("ep_world_size 2 is no multiple of 8 to 256, which this product needs")'
    assert_all_pass(run_ranks(SETUP + old, 2, devices=2, cann="8.5.0"))
    bare = (
        SETUP
        + """
x, ids, scales = to_device(*batch(4, 0))
rows, _, origins, _, counts, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
    x, ids, group, n, rank, EXPERTS)
try:
    torch_npu.npu_moe_distribute_combine_v2(
        rows, ids, origins, counts, scales, group, n, rank, EXPERTS)
except RuntimeError as error:
    assert "expand_scales must be given on this product" in str(error), error
else:
    raise AssertionError("an A2 combined without expand_scales")
"""
    )
    assert_all_pass(run_ranks(bare, 2, devices=2, cann="9.0.0"))


def test_hierarchy_of_an_a2_takes_no_mask_and_needs_the_weights(run_ranks):
    code = """
given = to_device(*batch(4, 0))
refused("x_active_mask with comm_alg hierarchy", comm_alg="hierarchy", expert_scales=given[2],
        x_active_mask=torch.ones(4, dtype=torch.bool).npu())
refused("comm_alg hierarchy without expert_scales", comm_alg="hierarchy")
check(Layer(comm_alg="hierarchy")(*given)[0], *batch(4, 0))
"""
    # Strict mode would refuse two ranks: the documented minimum is sixteen.
    assert_all_pass(run_ranks(SETUP + code, 2, devices=2, strict=False))


def test_without_arithmetic_ranks_stay_in_step(run_ranks):
    results = run_ranks(
        SETUP
        + """
layer = Layer()
for seed in range(2):
    out, tokens = layer(*to_device(*batch(6, seed)))
    assert out.shape == (6, H) and tokens.tolist() == [0] * local
""",
        2,
        devices=2,
        kernels="skip",
    )
    assert_all_pass(results)


def test_a_domain_is_for_collectives_or_for_dispatch_and_combine(run_ranks):
    results = run_ranks(
        SETUP
        + """
layer, given = Layer(), batch(4, 0)
layer(*to_device(*given))
torch.npu.synchronize()
try:
    dist.all_reduce(torch.ones(1).npu(), group=own)
except RuntimeError as error:
    assert "which operators use that communicate inside their kernel" in str(error), error
else:
    raise AssertionError("a collective ran in the domain of dispatch and combine")

shared = dist.new_group(list(range(n)))
dist.all_reduce(torch.ones(1).npu(), group=shared)
name = shared._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
refused("group_ep " + name + " has run collectives", domain=(name, n, rank, EXPERTS))

check(layer(*to_device(*given))[0], *given)  # neither refusal did any harm
""",
        2,
        devices=2,
    )
    assert_all_pass(results)


WITH_BUFFER = """
def domain_of(buffer_mb):
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": buffer_mb}
    made = dist.new_group(list(range(n)), pg_options=options)
    return (made._get_backend(torch.device("npu")).get_hccl_comm_name(rank), n, rank, EXPERTS)

def stopped(rule, rows, **options):
    layer = Layer(**options)
    try:
        layer(*to_device(*batch(rows, 0)))
        torch.npu.synchronize()
    except RuntimeError as error:
        assert rule in str(error), error
    else:
        raise AssertionError(rule)
    os._exit(0)  # the device is stopped
"""
A3 = {"soc": "Ascend910_9391", "hccl_expansion": "AICPU"}


def run_with_buffers(run_ranks, code, variable_mb, **settings):
    environment = {"HCCL_BUFFSIZE": str(variable_mb)}
    assert_all_pass(run_ranks(code, 2, devices=2, environment=environment, **settings))


# On 2 ranks of an A3, 512 rows of 1024 elements that choose 3 of 8 experts need a buffer of 2 * (4
# * 512 * 2 * 2560 + 3 * 512 * 2048) bytes, which is 26 MB.
@pytest.mark.parametrize(
    ("cann", "rule"),
    [
        ("8.5.0", '"HCCL_BUFFSIZE is too SMALL"'),
        slow("8.5.1", None),
        ("9.0.0", None),
        ("9.1.0", 'f"group_ep {large[0]} has a buffer of 27 MB, which must be HCCL_BUFFSIZE, 20"'),
    ],
)
def test_whether_mc2_takes_the_domains_buffer_or_the_variable(run_ranks, cann, rule):
    fits = """
H = 1024
x, ids, _ = batch(512, 0)
refused("HCCL_BUFFSIZE is too SMALL, NEEDED_HCCL_BUFFSIZE = 27MB, HCCL_BUFFSIZE=20MB", x, ids)
large = domain_of(27)
"""
    if rule:
        fits += f"refused({rule}, x, ids, large)"
    else:
        fits += """
layer, given = Layer(), batch(512, 1)
layer.domain = large
check(layer(*to_device(*given))[0], *given)
"""
    run_with_buffers(run_ranks, SETUP + WITH_BUFFER + fits, 20, cann=cann, **A3)


def test_the_kernel_of_an_a3_stops_where_the_buffer_is_smaller_than_the_variable(run_ranks):
    code = """
H = 1024
small = domain_of(10)
group = small[0]
stopped("AICORE exception: the communicator's buffer has 10 MB, and HCCL_BUFFSIZE says 20", 4)
"""
    run_with_buffers(run_ranks, SETUP + WITH_BUFFER + code, 20, cann="8.5.0", **A3)


# 256 rows of 64 elements need a buffer of 2 * (256 * 2 * 3 * 128 + 2 MiB) bytes, which is over 4
# MB.
def test_the_kernel_of_an_a2_runs_beyond_a_small_buffer(run_ranks):
    code = """
given = batch(256, 0)
layer = Layer()
layer.domain = domain_of(5)
check(layer(*to_device(*given))[0], *given)
stopped("MTE out of range: the batch needs 5 MB of the communicator's buffer, which has 4", 256)
"""
    run_with_buffers(run_ranks, SETUP + WITH_BUFFER + code, 4)


def test_the_runtimes_domain_has_the_buffer_that_every_release_looks_for(run_ranks, tmp_path):
    code = f"""
from dist_aclgraph.comm.groups import join_lockstep_group, make_groups
from dist_aclgraph.topology import ParallelLayout

n, buffers = 2, {{"buffer_mb": 20}}
join_lockstep_group("file://{tmp_path}/meeting", rank, n, 60.0, **buffers)
groups = make_groups(ParallelLayout(dp=n, ep=n, mc2=True), rank, mc2_buffer_mb=27, **buffers)
group = groups.mc2.hccl_name
{LAYER}
H = 1024
given = batch(512, 0)
check(Layer()(*to_device(*given))[0], *given)
assert groups.ep.backend.options.hccl_config == {{"hccl_buffer_size": 20}}
assert groups.mc2.backend.options.hccl_config == {{}}
"""
    run_with_buffers(run_ranks, code, 20, cann="8.5.0", **A3)
