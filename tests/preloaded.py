"""The fork server imports this module. It imports all slow packages, but opens no device."""

import atexit
import gc
import weakref

gc.disable()  # imports make no garbage, and collections would slow imports down

import ray  # noqa: E402

from dist_aclgraph.actors.worker import worker  # noqa: E402, F401
from dist_aclgraph.device import emulator  # noqa: E402

emulator.preload()

from dist_aclgraph.engine import model_runner  # noqa: E402, F401
from dist_aclgraph.layers import experts, shared_experts  # noqa: E402, F401
from dist_aclgraph.models import checkpoint, decoder  # noqa: E402, F401

# A forked program calls exit functions. The exit functions of torch_npu release the device, and are
# needed. The following two would take a tenth of a second: the first one imports more of Ray, and
# the second one removes torch's operators. The second one also removes temporary directories, so
# forked programs must use them in a ``with`` statement.
atexit.unregister(ray.shutdown)
atexit.unregister(weakref.finalize._exitfunc)

gc.collect()
gc.freeze()
gc.enable()
