"""The two calls of CANN's pyACL with which Ray counts the NPUs of a node. This module is used on
nodes with emulated NPUs.

Ray imports ``acl`` when a node starts. If the import fails and NPUs are declared, Ray prints two
tracebacks. This module is on Python's path in two cases only: while
``dist_aclgraph.actors.cluster.local_ray`` starts a local Ray, and in ``ray start`` with
``PYTHONPATH=emulator/python``.
"""

SOC_NAME = "Ascend910B1"


def get_soc_name() -> str:
    return SOC_NAME


class rt:
    """Runtime calls."""

    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """Return (number of devices, error code). The number is always 0. Ray gets the real number
        of NPUs from the program that starts Ray.
        """
        return 0, 0
