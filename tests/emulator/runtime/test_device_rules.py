"""The settings ``admit`` and ``refuse`` switch single rules of the emulator off and on, so that the
emulator can have the rules of a real device.
"""

import json

from dist_aclgraph.probe.questions import PROBES

CALLS = """
def attempt(call):
    try:
        call()
        torch.npu.synchronize()
        return "accepted"
    except RuntimeError as e:
        return str(e)
sums = [torch.zeros(4).npu() for _ in range(17)]
outs = [torch.zeros(4, 64).npu() for _ in range(17)]
print("MERGE", attempt(lambda: torch_npu.npu_attention_update(sums, outs, 0)))
print("SWIGLU", attempt(lambda: torch_npu.npu_swiglu(torch.zeros(2, 64).half().npu())))
"""


def test_the_emulator_has_its_own_rules_by_default(run_script):
    status, output = run_script(CALLS)

    assert status == 0, output
    assert "17 shares, at most 16" in output and "SWIGLU accepted" in output


def test_a_devices_rules_admit_and_refuse(run_script):
    status, output = run_script(CALLS, admit="head+size+9;17+shares", refuse="aclnnSwiGlu")

    assert status == 0, output
    assert "MERGE accepted" in output
    assert "aclnnSwiGlu: the device refuses this operator" in output


EVERY_RULE = """
from dist_aclgraph.probe.question import Bench
from dist_aclgraph.probe.questions import PROBES
bench = Bench(torch, torch_npu)
for probe in PROBES:
    if probe.rule and probe.ranks == 1:
        try:
            probe.call(bench)
            torch.npu.synchronize()
        except RuntimeError as e:
            print("REFUSED", probe.name, probe.rule in str(e), e)
"""


def test_a_file_admits_each_rule_that_a_probe_asks_about(run_script, tmp_path):
    parts = [probe.rule for probe in PROBES if probe.rule]
    parts.append("CANN 8.5 does not have this operator")  # one probe's call breaks this rule, too
    rules = tmp_path / "rules.toml"
    rules.write_text(f"[settings]\nadmit = {json.dumps(parts)}\n")

    # The operators compute nothing here, because the emulator's arithmetic has limits that some
    # calls exceed.
    status, output = run_script(EVERY_RULE, rules=str(rules), cann="8.5.0", kernels="skip")

    assert status == 0, output
    assert "REFUSED" not in output


def test_a_file_of_rules_replaces_other_settings(run_script, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[settings]\nsoc = "Ascend910B3"\nadmit = ["17 shares"]\n')

    status, output = run_script(
        CALLS + 'print("CHIP", torch.npu.get_device_name(0))', rules=str(rules), soc="Ascend910B1"
    )

    assert status == 0, output
    assert "MERGE accepted" in output and "CHIP Ascend910B3" in output
