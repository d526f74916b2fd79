"""Checks of files and shapes, which take a second, before anything is started."""

from __future__ import annotations

from dist_aclgraph.cli.plan_report import plan_report
from dist_aclgraph.config import Config
from dist_aclgraph.device.decision import decide_device
from dist_aclgraph.environment import ray_address
from dist_aclgraph.planning.planner import Planner
from dist_aclgraph.shapes.model_spec import read_model_spec
from dist_aclgraph.shapes.weight_files import check_weight_files


def check_deployment(config: Config) -> Config:
    """Decide the device, and return the configuration with it if a deployment may come up.

    A plan may be made of any model; to serve, its architecture must be supported and its weights
    be there.

    Raises:
        DeviceError: the NPUs that ranks are to run on here are not there.
        ConfigError: the configuration does not fit the model or the devices.
        ModelError: the checkpoint is broken, or not supported.
        StreamBudgetError: a rank cannot afford a single bucket.
    """
    config = decide_device(config, "here" if ray_address() is None else "cluster")
    read_model_spec(config.model)
    if config.weights == "checkpoint":
        check_weight_files(config.model)
    if config.device.kind == "auto":
        Planner.from_config(config)  # the nodes of the cluster know the memory of their devices
    else:
        plan_report(config)
    return config
