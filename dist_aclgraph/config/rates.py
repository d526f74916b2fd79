"""Files of measured rates, which replace the modelled rates of docs/develop/device-time.md."""

from __future__ import annotations

from pathlib import Path

import yaml

from dist_aclgraph.errors import DeviceError


def read_device_rates(path: str | Path) -> dict[str, str]:
    """Return the rates in a YAML or JSON file. This function does not check names and numbers.

    Raises:
        DeviceError: the file cannot be read, or is not a map of rates.
    """
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DeviceError(f"cannot read the rates {path}: {error}") from error
    if not isinstance(values, dict):
        raise DeviceError(f"the rates {path} must be names with numbers, such as matmul_us: 4.5")
    return {str(name): str(value) for name, value in values.items()}
