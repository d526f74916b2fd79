"""The gated delta rule of linear attention, and the norm with 1 + gamma.

The results are compared with transformers, or with plain formulas.
"""

import json

import pytest
import torch
import torch_npu

DIM, KEY_HEADS, VALUE_HEADS = 128, 2, 4
BF16 = {"atol": 1e-2, "rtol": 2e-2}
RECURRENT, CHUNK = "aclnnRecurrentGatedDeltaRule: ", "aclnnChunkGatedDeltaRule: "


@pytest.fixture(scope="module")
def qwen3_next():
    """Import transformers' module of Qwen3-Next, which takes seconds, and return it."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    return modeling_qwen3_next


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def make_inputs(tokens, decay=1.0):
    """Return the inputs of both operators for ``tokens`` tokens, by argument name."""
    torch.manual_seed(tokens)
    return {
        "query": unit(tokens, KEY_HEADS, DIM).bfloat16(),
        "key": unit(tokens, KEY_HEADS, DIM).bfloat16(),
        "value": torch.randn(tokens, VALUE_HEADS, DIM).bfloat16(),
        "beta": torch.rand(tokens, VALUE_HEADS).bfloat16(),
        "g": -decay * torch.rand(tokens, VALUE_HEADS),
        "scale": DIM**-0.5,
    }


def make_states(count):
    return torch.randn(count, VALUE_HEADS, DIM, DIM).bfloat16()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def on_device(options):
    return {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def expected(rule, inputs, rows, state):
    """Return transformers' results for the tokens in ``rows``, and the state after the last token.

    States are [.., keys, values], in the type of the inputs or in float32.
    """
    q, k, v, g, beta = (inputs[name][None, rows] for name in ("query", "key", "value", "g", "beta"))
    initial = state.float().mT[None]
    out, last = rule(
        q.float(), k.float(), v.float(), g, beta.float(), initial_state=initial,
        output_final_state=True,
    )  # fmt: skip
    return out[0], last[0].mT


def recurrent(inputs, states, lengths, slots, accepted, **changes):
    """Run the operator on valid arguments, except that ``changes`` replaces some arguments; return
    results and states.
    """
    options = inputs | {
        "state": states,
        "actual_seq_lengths": lengths,
        "ssm_state_indices": slots,
        "num_accepted_tokens": accepted,
    }
    options = on_device(options | changes)
    q, k, v, states = (options.pop(name) for name in ("query", "key", "value", "state"))
    out = torch_npu.npu_recurrent_gated_delta_rule(q, k, v, states, **options)
    return out.cpu(), states.cpu()


def chunk(inputs, state, lengths, **changes):
    options = inputs | {"initial_state": state, "actual_seq_lengths": lengths}
    options = on_device(options | changes)
    q, k, v = (options.pop(name) for name in ("query", "key", "value"))
    out, last = torch_npu.npu_chunk_gated_delta_rule(q, k, v, **options)
    return out.cpu(), last.cpu(), options["initial_state"].cpu()


@pytest.mark.parametrize("decay", [1.0, 40.0])
def test_each_token_of_each_request_has_its_state_in_its_slot(qwen3_next, decay):
    rule = qwen3_next.torch_recurrent_gated_delta_rule
    inputs, states = make_inputs(6, decay), make_states(9)
    slots = ints(5, 2, 7, 1, 0, 0)

    out, after = recurrent(inputs, states, ints(3, 1, 2), slots, ints(2, 1, 1))

    for start, stop, source in [(0, 3, 2), (3, 4, 1), (4, 6, 0)]:
        for end in range(start + 1, stop + 1):
            want, state = expected(rule, inputs, slice(start, end), states[source])
            torch.testing.assert_close(out[end - 1].float(), want[-1], **BF16)
            if slots[end - 1] or end == stop:
                torch.testing.assert_close(after[slots[end - 1]].float(), state, **BF16)
    untouched = [3, 4, 6, 8]
    assert torch.equal(after[untouched], states[untouched])


@pytest.mark.parametrize("decay", [1.0, 40.0])
@pytest.mark.parametrize("lengths", [(1,), (3, 64), (65, 1, 7)])
def test_parts_of_prompts(qwen3_next, lengths, decay):
    rule = qwen3_next.torch_chunk_gated_delta_rule
    inputs, states = make_inputs(sum(lengths), decay), make_states(len(lengths))

    out, last, before = chunk(inputs, states, ints(*lengths))

    assert torch.equal(before, states)
    start = 0
    for i, length in enumerate(lengths):
        rows = slice(start, start + length)
        want, state = expected(rule, inputs, rows, states[i])
        torch.testing.assert_close(out[rows].float(), want, **BF16)
        torch.testing.assert_close(last[i].float(), state, **BF16)
        start += length


def test_without_g_nothing_decays():
    inputs, states = make_inputs(2), make_states(2)
    arguments = (states, ints(2), ints(0, 1), ints(1))

    out, after = recurrent(inputs | {"g": None}, *arguments)

    want, state = recurrent(inputs | {"g": torch.zeros(2, VALUE_HEADS)}, *arguments)
    assert torch.equal(out, want) and torch.equal(after, state)


# The script gives the operator one decay per channel. torch_npu's documentation excludes such
# decays. So the setting ``admit`` switches the emulator's rule against them off.
CHANNELS = """
torch.manual_seed(3)
q, k = (torch.nn.functional.normalize(torch.randn(4, 2, 128), dim=-1).bfloat16() for _ in "qk")
v, beta = torch.randn(4, 4, 128).bfloat16(), torch.rand(4, 4).bfloat16()
g, gk = -torch.rand(4, 4), -4 * torch.rand(4, 4, 128)
states = torch.randn(6, 4, 128, 128).bfloat16()

def call(gk):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32).npu()
    after = states.npu()
    out = torch_npu.npu_recurrent_gated_delta_rule(
        q.npu(), k.npu(), v.npu(), after, beta=beta.npu(), scale=0.5, g=g.npu(), gk=gk.npu(),
        actual_seq_lengths=ints(3, 1), ssm_state_indices=ints(1, 2, 3, 5),
        num_accepted_tokens=ints(2, 1))
    return out.float().cpu(), after.float().cpu()

def wanted():
    outs, after = [], states.float()
    for token, (source, slot) in enumerate([(2, 1), (1, 2), (2, 3), (5, 5)]):
        state = states[source].float() if token in (0, 3) else state
        state = state * (g[token, :, None] + gk[token]).exp()[:, None, :]
        keys, queries = (x[token].float().repeat_interleave(2, 0)[..., None] for x in (k, q))
        error = v[token].float() - (state @ keys)[..., 0]
        state = state + (error * beta[token, :, None].float())[..., None] @ keys.mT
        outs.append(0.5 * (state @ queries)[..., 0])
        after[slot] = state
    return torch.stack(outs), after

for found, want in zip(call(gk), wanted()):
    torch.testing.assert_close(found, want, atol=1e-2, rtol=2e-2)
for rule, wrong in [("gk must be [4, 4, 128]", gk[..., :64]), ("gk must be float32", gk.half())]:
    try:
        call(wrong)
    except RuntimeError as error:
        assert rule in str(error), error
        print("REFUSED")
try:
    call(-gk)
except RuntimeError:
    print("STOPPED")
os._exit(0)  # the device is stopped
"""


def test_decays_of_channels(run_script):
    status, output = run_script(CHANNELS, admit="gk+is+not+supported")

    assert status == 0 and output.count("REFUSED") == 2, output
    assert RECURRENT + "gk has an element above 0" in output and "STOPPED" in output, output


def test_the_functional_form_leaves_its_states_unchanged():
    inputs, states = on_device(make_inputs(3)), make_states(4)
    at = {
        "actual_seq_lengths": ints(3).npu(),
        "ssm_state_indices": ints(1, 2, 3).npu(),
        "num_accepted_tokens": ints(2).npu(),
    }
    q, k, v = (inputs.pop(name) for name in ("query", "key", "value"))
    given, changed = states.npu(), states.npu()

    out, after = torch_npu.npu_recurrent_gated_delta_rule_functional(q, k, v, given, **inputs, **at)

    wanted = torch_npu.npu_recurrent_gated_delta_rule(q, k, v, changed, **inputs, **at)
    assert torch.equal(out, wanted) and torch.equal(after, changed)
    assert torch.equal(given.cpu(), states)


def test_with_modelled_time_states_are_not_computed_but_take_time(run_script):
    code = """
    q, state = torch.zeros(1, 4, 128).bfloat16().npu(), torch.ones(2, 4, 128, 128).bfloat16().npu()
    one = torch.ones(1, dtype=torch.int32).npu()
    torch.npu.synchronize()
    before = emulator.counters()["modelled_busy_ns"]
    torch_npu.npu_recurrent_gated_delta_rule(
        q, q, q, state, beta=q[..., 0], scale=1.0, actual_seq_lengths=one, ssm_state_indices=one,
        num_accepted_tokens=one, g=torch.zeros(1, 4).npu())
    torch.npu.synchronize()
    print("BUSY", emulator.counters()["modelled_busy_ns"] > before)
    """
    status, output = run_script(code, kernels="timed")
    assert status == 0 and "BUSY True" in output, output


def test_strided_inputs():
    inputs, states = make_inputs(4), make_states(4)
    arguments = (ints(4), ints(0, 1, 2, 3), ints(1))
    wide = torch.cat([inputs["query"], inputs["key"]], 1).npu()
    query, key = wide.chunk(2, 1)

    out, _ = recurrent(inputs | {"query": query, "key": key}, states.clone(), *arguments)

    assert not query.is_contiguous()
    assert torch.equal(out, recurrent(inputs, states, *arguments)[0])


UNWRITTEN = """
torch.manual_seed(3)
q, k, v = (torch.randn(4, heads, 128).bfloat16().npu() for heads in (2, 2, 4))
state = torch.randn(6, 4, 128, 128).bfloat16()
state[0], state[1], state[5] = torch.nan, -torch.nan, torch.inf
state = state.npu()
rest = {"beta": torch.rand(4, 4).bfloat16().npu(), "scale": 0.5, "g": -torch.rand(4, 4).npu()}

def ints(*values):
    return torch.tensor(values, dtype=torch.int32).npu()

def recurrent(source):
    torch_npu.npu_recurrent_gated_delta_rule(
        q, k, v, state, actual_seq_lengths=ints(4), ssm_state_indices=ints(source, 2, 3, 4),
        num_accepted_tokens=ints(1), **rest)

def chunk(source):
    torch_npu.npu_chunk_gated_delta_rule(
        q, k, v, initial_state=state[[2, source]], actual_seq_lengths=ints(1, 3), **rest)

for source in (0, 1, 5):
    OPERATOR(source)
torch.npu.synchronize()
print("NAN IS ACCEPTED")
state.view(torch.int16)[3].fill_(-1)  # as fresh memory
OPERATOR(3)
torch.npu.synchronize()
print("UNWRITTEN IS ACCEPTED")
os._exit(0)  # the device is stopped
"""


@pytest.mark.parametrize(
    "name,rule,strict",
    [
        ("recurrent", RECURRENT + "request 0 starts from slot 3 of state", 1),
        ("chunk", CHUNK + "request 1 starts from slot 1 of initial_state", 1),
        ("recurrent", RECURRENT + "request 0 starts", 0),
    ],
)
def test_a_state_that_nothing_has_written_is_refused(run_script, name, rule, strict):
    _, output = run_script(UNWRITTEN.replace("OPERATOR", name), strict=strict)

    assert "NAN IS ACCEPTED" in output, output
    assert (rule in output) == (strict == 1), output
    assert ("UNWRITTEN IS ACCEPTED" in output) == (strict == 0), output


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be bfloat16", {"query": torch.zeros(4, 2, DIM)}),
        ("beta must be bfloat16", {"beta": torch.zeros(4, 4)}),
        ("state must be bfloat16", {"state": torch.zeros(6, 4, DIM, DIM)}),
        ("g must be float32", {"g": torch.zeros(4, 4).bfloat16()}),
        ("actual_seq_lengths must be int32", {"actual_seq_lengths": torch.tensor([4])}),
        ("ssm_state_indices must be int32 [4]", {"ssm_state_indices": ints(1, 2, 3)}),
        ("num_accepted_tokens must be given", {"num_accepted_tokens": None}),
        ("num_accepted_tokens must be int32 [1]", {"num_accepted_tokens": ints(1, 1)}),
        ("Nv 3 is not a multiple of Nk 2", {"value": torch.zeros(4, 3, DIM).bfloat16()}),
        ("T is 4, but state has only 3 slots", {"state": make_states(3)}),
        ("state must be [slots, Nv, Dv, Dk]", {"state": make_states(6)[:, :, :64].contiguous()}),
        ("state must be contiguous", {"state": make_states(6).npu().mT}),
        ("gk is not supported yet, pass None", {"gk": torch.zeros(4, 4, DIM)}),
        ("Dk is 512, at most 256", {"query": torch.zeros(4, 2, 512).bfloat16(),
                                    "key": torch.zeros(4, 2, 512).bfloat16(),
                                    "state": torch.zeros(6, 4, DIM, 512).bfloat16()}),
    ],
)  # fmt: skip
def test_recurrent_refuses(rule, changes):
    with pytest.raises(RuntimeError) as error:
        recurrent(make_inputs(4), make_states(6), ints(4), ints(1, 2, 3, 4), ints(1), **changes)
    assert RECURRENT in str(error.value) and rule in str(error.value)


@pytest.mark.parametrize(
    "rule,changes",
    [
        ("query must be bfloat16", {"query": torch.zeros(4, 2, DIM)}),
        ("initial_state must be bfloat16", {"initial_state": torch.zeros(2, 4, DIM, DIM)}),
        ("initial_state of 3 states for 2 requests", {"initial_state": make_states(3)}),
        ("Dv must be 128, got 64", {"value": torch.zeros(4, 4, 64).bfloat16(),
                                    "initial_state": make_states(2)[:, :, :64].contiguous()}),
        ("Nv is 128, at most 64", {"value": torch.zeros(4, 128, DIM).bfloat16(),
                                   "beta": torch.zeros(4, 128).bfloat16(),
                                   "g": torch.zeros(4, 128),
                                   "initial_state": torch.zeros(2, 128, DIM, DIM).bfloat16()}),
    ],
)  # fmt: skip
def test_chunk_refuses(rule, changes):
    with pytest.raises(RuntimeError) as error:
        chunk(make_inputs(4), make_states(2), ints(3, 1), **changes)
    assert CHUNK in str(error.value) and rule in str(error.value)


# CANN does not check these values, because they are in tensors on the device. Each case stops its
# device, so each case uses another device.
BAD_VALUES = [
    ("num_accepted_tokens[0] is 0, not 1 to 3", [3, 1], [1, 2, 3, 4], [0, 1], -1.0),
    ("num_accepted_tokens[1] is 2, not 1 to 1", [3, 1], [1, 2, 3, 4], [1, 2], -1.0),
    ("ssm_state_indices[3] is 6, and state has 6 slots", [3, 1], [1, 2, 3, 6], [1, 1], -1.0),
    ("ssm_state_indices[0] is -1", [3, 1], [-1, 2, 3, 4], [1, 1], -1.0),
    ("requests 0 and 1 have the same slot 3", [3, 1], [1, 2, 3, 3], [1, 1], -1.0),
    ("actual_seq_lengths add up to 3, but T is 4", [2, 1], [1, 2, 3, 4], [1, 1], -1.0),
    ("actual_seq_lengths[1] is 0, not 1 to 8", [4, 0], [1, 2, 3, 4], [1, 1], -1.0),
    ("g has an element above 0", [3, 1], [1, 2, 3, 4], [1, 1], 0.5),
]


def test_values_that_the_device_would_not_check_are_refused(run_script):
    code = f"""
    cases = json.loads({json.dumps(json.dumps(BAD_VALUES))})
    def ints(values):
        return torch.tensor(values, dtype=torch.int32).npu()
    for device, (rule, lengths, slots, accepted, g) in enumerate(cases):
        torch.npu.set_device(device)
        q, v, beta = (torch.zeros(4, 4, n).bfloat16().npu() for n in (128, 128, 1))
        state = torch.zeros(6, 4, 128, 128).bfloat16().npu()
        try:
            torch_npu.npu_recurrent_gated_delta_rule(
                q, q, v, state, beta=beta[..., 0], scale=1.0, actual_seq_lengths=ints(lengths),
                ssm_state_indices=ints(slots), num_accepted_tokens=ints(accepted),
                g=torch.full((4, 4), g).npu())
            torch.npu.synchronize()
            print("ACCEPTED", rule)
        except RuntimeError as e:
            print("REFUSED" if rule in str(e) else "WRONG", rule, str(e)[:300])
    os._exit(0)  # the devices are stopped
    """
    status, output = run_script(code, devices=len(BAD_VALUES))
    assert status == 0 and output.count("REFUSED") == len(BAD_VALUES), output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_with_one_plus_gamma(qwen3_next, dtype):
    norm = qwen3_next.Qwen3NextRMSNorm(96).requires_grad_(False)
    norm.weight.normal_(0, 0.1)
    x = torch.randn(5, 3, 96).to(dtype)

    y, rstd = torch_npu.npu_gemma_rms_norm(x.npu(), norm.weight.to(dtype).npu())

    norm.weight.copy_(norm.weight.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y.cpu(), norm(x), atol=tolerance, rtol=tolerance)
    want = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    torch.testing.assert_close(rstd.cpu(), want)


def test_norm_with_one_plus_gamma_refuses():
    x = torch.zeros(4, 2, 16).npu()
    for rule, arguments in [
        ("gamma must be Float", (x, torch.zeros(16).half().npu())),
        ("x must be contiguous", (x.mT, torch.zeros(2).npu())),
    ]:
        with pytest.raises(RuntimeError) as error:
            torch_npu.npu_gemma_rms_norm(*arguments)
        assert "aclnnGemmaRmsNorm: " in str(error.value) and rule in str(error.value)
