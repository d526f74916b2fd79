"""``dist-aclgraph probe`` asks a device questions, and writes a report. A question is a short test;
its answer is compared with the emulator's answer.

Each question runs in a separate process.
"""
