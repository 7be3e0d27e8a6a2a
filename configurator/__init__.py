"""Settings of every script: defaults < recipe files < command-line flags, checked before anything runs.

resolved = load(TrainConfig, argv)      # or a script's own subclass of Settings
print(describe(resolved))
config = resolved.config
"""

from configurator.config import ModelConfig, Settings, TrainConfig
from configurator.errors import ConfigError, run
from configurator.layers import LayerSpec, expand_layers, format_layers, parse_layers
from configurator.parse import Resolved, describe, load

__all__ = [
    "ConfigError", "LayerSpec", "ModelConfig", "Resolved", "Settings", "TrainConfig",
    "describe", "expand_layers", "format_layers", "load", "parse_layers", "run",
]  # fmt: skip
