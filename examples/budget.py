"""Print how many buckets four historical formulas allow for a model with a given number of layers.

``python examples/budget.py [layers] [tp]``
"""

import sys

from dist_aclgraph.planning.budget import LegacyInputs, legacy_sizes, max_buckets

layers, tp = (int(n) for n in (*sys.argv[1:], *("48", "8")[len(sys.argv) - 1 :]))

if __name__ == "__main__":
    inputs = LegacyInputs(num_hidden_layers=layers, tp=tp, max_num_seqs=256)
    for variant in ("v0.11", "v0.13", "v0.20", "last"):
        sizes = legacy_sizes(inputs, variant)
        print(f"{variant}: {max_buckets(inputs, variant)} buckets: {', '.join(map(str, sizes))}")
