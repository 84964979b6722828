"""The state of Adam and AdamW in torch.optim's layout, and back: training can move between the frameworks.

torch.optim numbers parameters in the order of ``policy.parameters()``, that is of the ``state_dict`` without its
buffers. Optimizer options (betas, eps, ...) are state in torch and config in ejax: they must agree. NumPy only.
Source: ``state_dict`` of torch.optim.Adam.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import optax

from ejax.optim import OPTIMIZER_KWARGS, OptimizerConfig, get_learning_rate, make_optimizer
from ejax.types import Params, Policy, PyTree
from interop.checkpoints.weights import tensors
from interop.exporters.entries import Entry, get, put


def torch_optimizer_state(policy: Policy, opt_state: PyTree, config: OptimizerConfig) -> dict[str, Any]:
    """Make the state that ``torch.optim.Adam`` or ``AdamW`` over ``policy.parameters()`` loads, in NumPy arrays.
    ``opt_state``: of ``make_optimizer(config)``. Raises ValueError: an optimizer other than adam and adamw."""
    entries = [entry for entry in tensors(policy) if entry.trained]
    mu, nu, count = (_moment(opt_state, name, config) for name in ("mu", "nu", "count"))
    state = {
        i: {
            "step": np.array(count, np.float32),
            "exp_avg": entry.to_torch(get({"params": mu}, entry.path)),
            "exp_avg_sq": entry.to_torch(get({"params": nu}, entry.path)),
        }
        for i, entry in enumerate(entries)
    }
    # every key that torch's own state_dict has, or load_state_dict fails
    group = {
        "lr": float(get_learning_rate(opt_state)),
        **_adam_options(config),
        "amsgrad": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "params": list(range(len(entries))),
    }
    return {"state": state if count > 0 else {}, "param_groups": [group]}


def opt_state_from_torch(policy: Policy, params: Params, state: Mapping[str, Any], config: OptimizerConfig) -> PyTree:
    """Invert ``torch_optimizer_state``: make a state of ``make_optimizer(config)``, learning rate included. ``params``:
    of the policy; only their shapes count. Raises ValueError: another optimizer than the config's, or other options;
    parameters without state, or with states of different age; arrays that are missing or of another shape. A critic
    without any state is in order: GRPO and APG give it no gradients, and its moments are 0."""
    fresh = make_optimizer(config).init(params["params"])
    _moment(fresh, "count", config)
    group = _only_group(state)
    _check_options(group, config)
    fresh = optax.tree_utils.tree_set(fresh, learning_rate=np.float32(group["lr"]))
    if not state["state"]:
        return fresh
    entries = [entry for entry in tensors(policy) if entry.trained]
    if len(group["params"]) != len(entries):
        raise ValueError(f"the optimizer has {len(group['params'])} parameters, the policy {len(entries)}")
    moments: dict[str, Params] = {"exp_avg": {}, "exp_avg_sq": {}}
    counts = set()
    states = dict(zip(entries, (state["state"].get(number) for number in group["params"]), strict=True))
    _check_states(states)
    for entry, of_entry in states.items():
        shape = entry.to_torch(get(params, entry.path)).shape
        if of_entry is None:
            of_entry = dict.fromkeys(moments, np.zeros(shape, np.float32))
        else:
            counts.add(int(np.asarray(of_entry["step"]).item()))
        for name, tree in moments.items():
            moment = np.asarray(of_entry[name])
            if moment.shape != shape:
                raise ValueError(f"{name} of {entry.key} is {list(moment.shape)}, the parameter is {list(shape)}")
            put(tree, entry.path, entry.to_flax(moment))
    if len(counts) > 1:
        raise ValueError(f"the optimizer took {sorted(counts)} steps for different parameters; optax keeps one count")
    return optax.tree_utils.tree_set(
        fresh, mu=moments["exp_avg"]["params"], nu=moments["exp_avg_sq"]["params"], count=np.int32(counts.pop())
    )


def _check_states(states: Mapping[Entry, Mapping[str, Any] | None]) -> None:
    """Refuse parameters without Adam's state, except a critic that has none at all."""
    stateless = [entry.key for entry, of_entry in states.items() if of_entry is None]
    if stateless and stateless != [entry.key for entry in states if entry.key.startswith("critic.")]:
        text = f"the optimizer has no state for {stateless[0]}: it was never trained, and optax has one count"
        raise ValueError(text)
    for entry, of_entry in states.items():
        missing = [] if of_entry is None else [x for x in ("step", "exp_avg", "exp_avg_sq") if x not in of_entry]
        if missing:
            raise ValueError(f"the optimizer's state of {entry.key} lacks {', '.join(missing)}: it is not Adam's")


def _adam_options(config: OptimizerConfig) -> dict[str, Any]:
    options: Any = OPTIMIZER_KWARGS[config.name](**dict(config.kwargs))
    return {
        "betas": tuple(options.betas),
        "eps": options.eps,
        "weight_decay": options.weight_decay,
        "maximize": options.maximize,
        "decoupled_weight_decay": config.name == "adamw",
    }


def _check_options(group: Mapping[str, Any], config: OptimizerConfig) -> None:
    """Options that torch keeps in the state and ejax in the config must agree."""
    wanted: dict[str, Any] = {**_adam_options(config), "amsgrad": False}
    given = {name: tuple(group[name]) if name == "betas" else group[name] for name in wanted if name in group}
    differ = [f"{name} is {x} in it, {wanted[name]} in the config" for name, x in given.items() if x != wanted[name]]
    if differ:
        text = f"the optimizer's state does not belong to algorithm.cfg.optimizer ({config.name}): {'; '.join(differ)}"
        raise ValueError(text)


def _only_group(state: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = state["param_groups"]
    if len(groups) != 1:
        raise ValueError(f"the optimizer has {len(groups)} parameter groups; EmbodiChain's and ejax's have one")
    return groups[0]


def _moment(opt_state: PyTree, name: str, config: OptimizerConfig) -> Any:
    if config.name not in ("adam", "adamw"):
        text = f"the state of optimizer '{config.name}' cannot be moved between torch and ejax; adam, adamw can"
        raise ValueError(text)
    return optax.tree_utils.tree_get(opt_state, name)
