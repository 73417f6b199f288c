"""The config of a run: its sections and keys, and how it is read from a file and overrides."""

from pipelines.config.reading import LOGS_BASE, known_keys, load_config, section_of
from pipelines.config.sections import Config, SamplingSetting

__all__ = ["LOGS_BASE", "Config", "SamplingSetting", "known_keys", "load_config", "section_of"]
