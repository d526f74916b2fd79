"""The fork server of the tests imports this module, which imports all slow packages, but opens no
device.
"""

import atexit
import gc
import weakref

gc.disable()  # imports create no garbage, and garbage collection would slow them down

import ray  # noqa: E402

from dist_aclgraph.actors.worker import worker  # noqa: E402, F401
from dist_aclgraph.device import emulator  # noqa: E402

emulator.preload()

from dist_aclgraph.engine import model_runner  # noqa: E402, F401
from dist_aclgraph.layers import experts, shared_experts  # noqa: E402, F401
from dist_aclgraph.models import checkpoint, decoder  # noqa: E402, F401

# Forked programs call exit functions. The exit functions of torch_npu are needed, because they
# release the device. Two other exit functions are removed here, because they would take a tenth of
# a second. The first function imports further modules of Ray. The second function removes torch's
# operators. It also removes temporary directories, so forked programs must create temporary
# directories in a ``with`` statement.
atexit.unregister(ray.shutdown)
atexit.unregister(weakref.finalize._exitfunc)

gc.collect()
gc.freeze()
gc.enable()
