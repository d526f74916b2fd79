"""With torch's own sample inputs, each operator returns the same results as on the CPU, or refuses
the inputs.

For each operator and type, `data/operator_samples.json` records whether the results were equal. For
refused samples, the file also records what refused them: the operators of CANN by name, or
torch_npu. The test tries one sample of every fourth operator. With the hypothesis profile "full",
it tries many samples of all operators. `python tests/emulator/operators/test_operator_samples.py`
writes the file anew.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from dist_aclgraph.device.versions import DEFAULT, installed_name
from tests import laws

HERE = Path(__file__).parents[1]
SCRIPT = (HERE / "scripts" / "operator_samples.py").read_text(encoding="utf-8")
LIST = HERE / "data" / "operator_samples.json"
FEW, MANY = 1, 12
PROCESSES = 2

# Operators whose results cannot equal the results of the CPU. The name of each set tells the
# reason.
RANDOM = {
    "bernoulli", "exponential", "multinomial", "nn_functional_fractional_max_pool2d",
    "nn_functional_fractional_max_pool3d", "normal", "normal_in_place", "normal_number_mean",
    "nn_functional_alpha_dropout", "nn_functional_dropout", "nn_functional_dropout2d",
    "nn_functional_dropout3d", "nn_functional_feature_alpha_dropout_with_train", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "uniform",
}  # fmt: skip
UNWRITTEN = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
FLOAT32_FOR_FLOAT64 = {"double", "float_power", "to"}  # torch_npu uses float32 for float64
# torch_npu approximates gelu by tanh, and its masks for dropout have one bit per element.
OTHER_FORM = {"nn_functional_gelu", "native_dropout_backward"}
DIFFERENT = RANDOM | UNWRITTEN | FLOAT32_FOR_FLOAT64 | OTHER_FORM


def try_operators(run_script, most, names):
    """Try the operators ``names``; return the script's verdict for each operator and type.

    If an operator stops the device, a new process tries the remaining operators.
    """
    done, names = [], list(names)
    while names:
        code = f"sys.argv = {['', str(most), *names]!r}\n" + SCRIPT
        status, output = run_script(code, timeout_s=1500)
        lines = [line.split(" ", 1) for line in output.splitlines()]
        done += [json.loads(rest) for word, *rest in lines if word == "VERDICT" for rest in rest]
        if status == 0:
            break
        name, dtype = json.loads([rest for word, *rest in lines if word == "TRYING"][-1][0])
        done.append([name, dtype, 0, [], ["stops the device"]])
        names = names[names.index(name) + 1 :]
    return done


def try_beside_each_other(run_script, most, names):
    """Run ``try_operators`` in several processes at the same time; return all verdicts."""
    parts = [sorted(names)[i::PROCESSES] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        done = pool.map(lambda part: try_operators(run_script, most, part), parts)
        return [verdict for part in done for verdict in part]


@pytest.mark.slow
@pytest.mark.skipif(installed_name() != DEFAULT, reason=f"the list is for torch {DEFAULT}")
def test_samples_are_equal_or_refused_by_name(run_script):
    known = json.loads(LIST.read_text(encoding="utf-8"))
    names = sorted(known) if laws.is_full() else sorted(known)[::4]

    found = try_beside_each_other(run_script, MANY if laws.is_full() else FEW, names)

    assert {name for name, *_ in found} == set(names)
    surprises = []
    for name, dtype, equal, refusals, problems in found:
        was_equal, refused_by = known[name][dtype]
        if problems and name not in DIFFERENT:
            surprises.append((name, dtype, problems))
        if new := set(refusals) - set(refused_by):
            surprises.append((name, dtype, f"now refused by {sorted(new)}"))
        if equal and not was_equal:
            surprises.append((name, dtype, "equal now: write the list again"))
    assert surprises == []


def write_list():
    """Try many samples of all operators, write the list of verdicts, and print the errors."""
    from conftest import Script
    from torch.testing._internal.common_methods_invocations import op_db

    def run_script(code, timeout_s):
        with NamedTemporaryFile() as file:
            return Script(code, {}, {}, Path(file.name), fresh=True).finish(timeout_s)

    known = {}
    names = {op.formatted_name for op in op_db}
    for name, dtype, equal, refusals, problems in try_beside_each_other(run_script, MANY, names):
        known.setdefault(name, {})[dtype] = [bool(equal), refusals]
        if problems and name not in DIFFERENT:
            print(name, dtype, problems, file=sys.stderr)
    rows = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    LIST.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_list()
