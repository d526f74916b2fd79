"""The configuration: one YAML file becomes one frozen, checked tree.

Each module contains the keys of one section; ``tree`` joins the sections, ``loading`` reads YAML.
"""

from __future__ import annotations

from dist_aclgraph.config.cluster import ClusterConfig
from dist_aclgraph.config.device import (
    DeviceConfig,
    EmulatorConfig,
    FaultConfig,
    FusionName,
    HcclExpansion,
)
from dist_aclgraph.config.graph import DECODE_MODES, BudgetModelName, GraphConfig, GraphMode
from dist_aclgraph.config.kv import KVConfig
from dist_aclgraph.config.kv_events import KVEventsConfig
from dist_aclgraph.config.loading import (
    load_config,
    load_with_options,
    make_config,
    parse_overrides,
    read_value,
    to_yaml,
)
from dist_aclgraph.config.logs import LoggingConfig
from dist_aclgraph.config.parallel import ExchangeSetting, Mc2Algorithm, ParallelConfig
from dist_aclgraph.config.scheduler import SchedulerConfig
from dist_aclgraph.config.section import Section
from dist_aclgraph.config.serve import AutoscaleConfig, ServeConfig
from dist_aclgraph.config.tree import Config, SpeculativeConfig, TimeoutConfig

__all__ = [
    "DECODE_MODES",
    "AutoscaleConfig",
    "BudgetModelName",
    "ClusterConfig",
    "Config",
    "DeviceConfig",
    "EmulatorConfig",
    "ExchangeSetting",
    "FaultConfig",
    "FusionName",
    "GraphConfig",
    "GraphMode",
    "HcclExpansion",
    "KVConfig",
    "KVEventsConfig",
    "LoggingConfig",
    "Mc2Algorithm",
    "ParallelConfig",
    "SchedulerConfig",
    "Section",
    "ServeConfig",
    "SpeculativeConfig",
    "TimeoutConfig",
    "load_config",
    "load_with_options",
    "make_config",
    "parse_overrides",
    "read_value",
    "to_yaml",
]
