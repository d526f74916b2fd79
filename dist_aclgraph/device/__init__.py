"""Access to the NPU. Only this package imports torch_npu, which runs on an NPU or on the
emulator.
"""
