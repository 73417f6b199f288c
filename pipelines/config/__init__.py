"""The config of a run: what a user may say, and how it is read.

An unknown key is an error that names it and the nearest known one.
"""

from pipelines.config.reading import load_config
from pipelines.config.sections import Embedded, EmbeddedModel, SamplingSetting
from pipelines.config.whole import Config

__all__ = ["Config", "Embedded", "EmbeddedModel", "SamplingSetting", "load_config"]
