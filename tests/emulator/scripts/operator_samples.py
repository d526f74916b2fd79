"""Runs operators with torch's own sample inputs on the CPU and on the emulator, and prints one
verdict per line.

Arguments: the largest number of samples for each operator and type, then the names of operators. A
verdict is "VERDICT" and a JSON list: name, type, number of samples with equal results, sources of
refusals (operators of CANN, or torch_npu), and errors. If an operator stops the device, the script
ends. The caller then starts the script again with the next operator.
"""

import json
import re
import sys
import warnings
from itertools import islice

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

warnings.filterwarnings("ignore")
TYPES = [torch.float32, torch.int64, torch.bool]
# The emulator may add the terms of a float32 sum in another order than torch.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
REFUSALS = (
    r"(aclnn\w+): (?!null)",
    r"(aclnn\w+) is not emulated",
    r"GE operator (\w+)",
    r"(acl\w+) or \w+ not in libopapi.so",
)
# These words are in the text of errors that torch or torch_npu raises before any operator is
# launched.
FRONT = (
    "not supported|[Uu]nsupported|[Ee]xpected|[Nn]ot [Ii]mplemented|[Cc]ould not run|"
    "does not support|must be|should be|only support|don't|doesn't"
)


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.npu()
    if isinstance(value, torch.device) or value == "cpu":
        return torch.device("npu")
    return value


def arguments_of(sample, place):
    return tree_map(place, (sample.input, tuple(sample.args), dict(sample.kwargs)))


def run(op, arguments):
    first, args, kwargs = arguments
    return op(first, *args, **kwargs)


def refusal_of(error):
    text = str(error)
    for pattern in REFUSALS:
        if found := re.search(pattern, text):
            return found.group(1)
    if re.search(FRONT, text):
        return "torch_npu"
    return None


def difference(got, want):
    got, want = (tree_flatten(v)[0] for v in (got, want))
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            if g != w:
                return f"{g} for {w}"
            continue
        try:
            torch.testing.assert_close(g.cpu(), w, equal_nan=True, check_stride=False, **TOLERANCE)
        except AssertionError as error:
            return str(error).splitlines()[0]
    return None


def try_operator(op, dtype, most):
    equal, refusals, wrong = 0, set(), []
    for sample in islice(op.sample_inputs("cpu", dtype), most):
        torch.manual_seed(0)
        given = arguments_of(sample, lambda v: v.clone() if isinstance(v, torch.Tensor) else v)
        device = arguments_of(sample, on_device)
        try:
            want = run(op, given)
        except Exception:
            continue
        try:
            got = run(op, device)
            problem = difference(got, want)
        except Exception as error:
            torch.npu.synchronize()  # raises an error if the device is stopped
            if name := refusal_of(error):
                refusals.add(name)
            else:
                lines = [line for line in str(error).splitlines() if line]
                wrong.append(f"{type(error).__name__}: {lines[0] if lines else ''}"[:200])
            continue
        if problem:
            wrong.append(problem[:200])
        else:
            equal += 1
    return equal, sorted(refusals), wrong[:2]


def main():
    most, names = int(sys.argv[1]), set(sys.argv[2:])
    torch.set_num_threads(1)
    for op in op_db:
        name = op.formatted_name
        if names and name not in names:
            continue
        for dtype in TYPES:
            if dtype not in op.dtypes:
                continue
            print("TRYING", json.dumps([name, str(dtype)[6:]]), flush=True)
            equal, refusals, wrong = try_operator(op, dtype, most)
            print("VERDICT", json.dumps([name, str(dtype)[6:], equal, refusals, wrong]), flush=True)


main()
