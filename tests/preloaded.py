"""The fork server imports this module. It imports all slow packages, but opens no device."""

import gc

gc.disable()  # imports make no garbage, and collections would slow imports down

from dist_aclgraph.actors.worker import worker  # noqa: E402, F401
from dist_aclgraph.device import emulator  # noqa: E402

emulator.preload()

from dist_aclgraph.engine import model_runner  # noqa: E402, F401
from dist_aclgraph.layers import experts, shared_experts  # noqa: E402, F401
from dist_aclgraph.models import checkpoint, decoder  # noqa: E402, F401

gc.collect()
gc.freeze()
gc.enable()
