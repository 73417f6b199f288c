"""The config of a run: its sections and keys, and how it is read from a file and overrides."""

from pipelines.config.reading import LOGS_BASE, load_config
from pipelines.config.sections import Embedded, EmbeddedModel, SamplingSetting
from pipelines.config.whole import Config

__all__ = ["LOGS_BASE", "Config", "Embedded", "EmbeddedModel", "SamplingSetting", "load_config"]
