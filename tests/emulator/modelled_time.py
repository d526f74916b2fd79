"""Code that tests put in front of their scripts for a device with modelled time."""

HELPERS = """
rates = emulator.rates()
main = torch.npu.current_stream()
events = lambda n: [torch.npu.Event(enable_timing=True) for _ in range(n)]
def print_json(**values):
    print("JSON " + json.dumps(values))
side, gate = torch.npu.Stream(), torch.npu.ExternalEvent()
def close_gate():
    "What is queued from here on begins when the gate is opened, however slow the host is."
    gate.wait(main)
    gate.reset(main)
def open_gate():
    gate.record(side)
    torch.npu.synchronize()
"""
