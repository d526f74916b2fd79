"""The two calls of CANN's pyACL that Ray makes to count a node's NPUs, for emulated ones.

Ray imports ``acl`` where a node starts; without it, declared NPUs make it print two tracebacks. On
the path only while a local Ray starts (``dist_aclgraph.actors.cluster.local_ray``), or for
``ray start`` by ``PYTHONPATH=emulator/python``.
"""

SOC_NAME = "Ascend910B1"


def get_soc_name() -> str:
    return SOC_NAME


class rt:
    """Runtime calls."""

    @staticmethod
    def get_device_count() -> tuple[int, int]:
        """Return (devices, error code): none of their own, Ray is told how many to declare."""
        return 0, 0
