"""The NPU: the only package that imports torch_npu, real or on the emulator."""
