"""Simulate a load with the chosen graphs: random requests, assumed step times, no device.

``python examples/simulate.py [configs/x.yaml]``
"""

import sys

from dist_aclgraph.config import load_config
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.simulation import simulate
from dist_aclgraph.simulate.times import line_times

path = sys.argv[1] if len(sys.argv) > 1 else "configs/tiny-qwen3.yaml"

if __name__ == "__main__":
    times = line_times(step_ms=8.0, token_ms=0.02, capture_ms=300.0)
    options = LoadOptions(poisson=5.0, requests=200)
    report = simulate(load_config(path), options, times)
    for group in report["groups"]:
        print(f"{group['steps']} steps, {group['padding_share']:.1%} padding")
        print("replays:", group["replays"])
        print("eager steps:", group["eager_steps"])
