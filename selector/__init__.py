"""What an engine installs, and the learner. It knows nothing of language models.

The names below are imported when they are first used: `InputError` needs no torch, and replay needs
libraries that an engine need not have.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selector.actions import Action, ActionSpace
    from selector.latency import LatencyProfile
    from selector.runtime.policy import Policy
    from selector.runtime.selector import Selector, load_selector
    from selector.sampling import Sampling
    from selector.schema import InputError
    from selector.train.data import Texts, Timed
    from selector.train.replay import Ratio, Replayed, ratio_of_speeds, replay

__all__ = [
    "Action",
    "ActionSpace",
    "InputError",
    "LatencyProfile",
    "Policy",
    "Ratio",
    "Replayed",
    "Sampling",
    "Selector",
    "Texts",
    "Timed",
    "load_selector",
    "ratio_of_speeds",
    "replay",
]
_MODULES = {
    "actions": ("Action", "ActionSpace"),
    "latency": ("LatencyProfile",),
    "runtime.selector": ("Selector", "load_selector"),
    "runtime.policy": ("Policy",),
    "sampling": ("Sampling",),
    "schema": ("InputError",),
    "train.data": ("Texts", "Timed"),
    "train.replay": ("Ratio", "Replayed", "ratio_of_speeds", "replay"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"selector.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
