"""A stand-in for EmbodiChain's package: the names that its tests import, each a thin translation to ejax.

A module of ``MODULES`` *is* the module of translations that it names, so that what a test replaces there is replaced.
Any other module of EmbodiChain's exists too, and has every name: each raises ``NotProvidedError`` once it is called.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_RL = "embodichain.learning.rl"
_MANAGERS = "embodichain.lab.gym.envs.managers"
MODULES = {
    **dict.fromkeys(("embodichain.data_pipeline.engine", "embodichain.data_pipeline.engine.data"), "upstream_engine"),
    "embodichain.data_pipeline.datasets": "upstream_datasets",
    **dict.fromkeys((f"{_RL}.algo", f"{_RL}.utils", f"{_RL}.routing"), "upstream_algo"),
    **dict.fromkeys((f"{_RL}.models", f"{_RL}.collector", f"{_RL}.buffer", f"{_RL}.evaluation"), "upstream_rollouts"),
    **dict.fromkeys(
        (_RL, f"{_RL}.differentiable_trainer", f"{_RL}.utils.trainer", f"{_RL}.train"), "upstream_training"
    ),
    **dict.fromkeys(
        (f"{_RL}.env", f"{_RL}.experimental.newton", "embodichain_tasks.rl.basic.point_mass"), "upstream_envs"
    ),
    f"{_RL}.experimental.newton.train_planar_reach": "upstream_planar_reach",
    **dict.fromkeys((_MANAGERS, f"{_MANAGERS}.cfg", f"{_MANAGERS}.actions"), "upstream_actions"),
    **dict.fromkeys((f"{_MANAGERS}.randomization.physics", "embodichain.lab.sim.cfg"), "upstream_events"),
    **dict.fromkeys((f"{_MANAGERS}.rewards", f"{_MANAGERS}.observations"), "upstream_functors"),
}
"""EmbodiChain's module -> the module here that translates its names."""


class NotProvidedError(NotImplementedError):
    """A name of EmbodiChain's that has no translation."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("embodichain", "embodichain_tasks") or "." not in name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in MODULES:
            found = importlib.import_module(MODULES[name])
            vars(found).setdefault("__getattr__", lambda each: _not_provided(name, each))
            found.__path__ = []  # a package: it may have modules below it
            for below, module_name in MODULES.items():  # ``from a.b import c`` looks for c in the module itself
                if below.rpartition(".")[0] == name and module_name == MODULES[name]:
                    setattr(found, below.rpartition(".")[2], found)
            sys.modules[name] = found  # the import system returns what stands there
        else:
            vars(module)["__getattr__"] = lambda each: _not_provided(name, each)


def _not_provided(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{module}.{name}"

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotProvidedError(full)

    # a class, which tests may inherit from, or look for instances of
    return type(name, (), {"__init__": refuse, "__module__": module})


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
