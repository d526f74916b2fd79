"""Print which graphs a deployment would capture and what they cost each rank. No device is needed.

``python examples/plan.py [configs/x.yaml] [key=value ...]``
"""

import sys

from dist_aclgraph.config import load_config, parse_overrides
from dist_aclgraph.device.decision import decide_device
from dist_aclgraph.planning.ledger import Ledger
from dist_aclgraph.simulate.deployment import AssumedDeployment

path, *overrides = sys.argv[1:] or ["configs/tiny-qwen3.yaml"]

if __name__ == "__main__":
    config = decide_device(load_config(path, parse_overrides(overrides)), "plan")
    deployment = AssumedDeployment.from_config(config)
    negotiated = deployment.planner.negotiate(deployment.offers)
    for family in negotiated.plan.families:
        print(f"{family.name}: {', '.join(map(str, family.buckets))} tokens")
    for reason in negotiated.plan.reasons:
        print(f"because {reason}")
    ledger = Ledger.predict(negotiated.offers[0], negotiated.plan, deployment.budget_model)
    print(f"rank 0 pays {ledger.predicted_streams} of {ledger.offered_streams} streams")
