"""Checks files and shapes before anything is started. The checks take about a second."""

from __future__ import annotations

from dist_aclgraph.cli.plan_report import plan_report
from dist_aclgraph.config import Config
from dist_aclgraph.device.decision import decide_device
from dist_aclgraph.environment import ray_address
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.shapes.model_task import read_task
from dist_aclgraph.shapes.weight_files import check_weight_files


def check_deployment(config: Config) -> Config:
    """Choose the device, and return the configuration with this device. Raise an error if a
    deployment cannot start.

    The check includes the files of weights.

    Raises:
        DeviceError: this machine has fewer NPUs than the ranks need.
        ConfigError: the configuration does not fit the model or the devices.
        ModelError: the checkpoint is broken, or not supported.
        StreamBudgetError: a rank has too few streams for even one bucket.
    """
    config = decide_device(config, "here" if ray_address() is None else "cluster")
    if config.device.kind == "auto":
        # This checks only the shapes, because the memory of the cluster's devices is unknown here
        Planner.from_config(config)
    else:
        plan_report(config)
    if config.weights == "checkpoint":
        check_weight_files(config.model)
    read_task(config)
    return config
