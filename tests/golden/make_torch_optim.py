"""Write torch_optim.npz: what torch.optim does to two parameters over six steps. Made with torch 2.13.0, on a CPU.

Usage: python make_torch_optim.py     (in an environment with torch; ejax is not needed)

Keys: ``gradient/<parameter>`` [steps, ...]; ``initial/<parameter>``; ``<case>/<parameter>`` [steps, ...], after
each step; ``cases``: JSON {case: [optimizer, learning rate, kwargs]}; ``clip/*``: ``clip_grad_norm_``;
``schedule/<name>``: the learning rate before each update; ``schedules``: JSON {name: [class, kwargs]}.
"""

import json
import warnings
from pathlib import Path

import numpy as np
import torch

STEPS = 6
OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
CASES = {
    "adam": ("adam", 0.01, {}),
    "adam_all": ("adam", 0.02, {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1, "maximize": True}),
    "adamw": ("adamw", 0.01, {}),
    "adamw_all": ("adamw", 0.02, {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3, "maximize": True}),
    "sgd": ("sgd", 0.1, {}),
    "sgd_momentum": ("sgd", 0.1, {"momentum": 0.9}),
    "sgd_nesterov": ("sgd", 0.1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    "sgd_dampening": ("sgd", 0.1, {"momentum": 0.8, "dampening": 0.3, "maximize": True}),
    "rmsprop": ("rmsprop", 0.01, {}),
    "rmsprop_centered": ("rmsprop", 0.01, {"centered": True, "alpha": 0.9}),
    "rmsprop_all": (
        "rmsprop",
        0.01,
        {"centered": True, "alpha": 0.9, "momentum": 0.7, "weight_decay": 0.1, "eps": 1e-6, "maximize": True},
    ),
}
SCHEDULES = {
    "linear": ("LinearLR", {"start_factor": 1.0, "end_factor": 0.4, "total_iters": 5}),
    "cosine": ("CosineAnnealingLR", {"T_max": 6, "eta_min": 0.001}),
    "step": ("StepLR", {"step_size": 3, "gamma": 0.5}),
    "exponential": ("ExponentialLR", {"gamma": 0.9}),
}


def main() -> None:
    rng = np.random.default_rng(0)
    initial = {"weight": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}
    gradient = {name: rng.normal(size=(STEPS, *x.shape)) for name, x in initial.items()}
    out = {f"initial/{name}": x.astype(np.float32) for name, x in initial.items()}
    out |= {f"gradient/{name}": x.astype(np.float32) for name, x in gradient.items()}

    for case, (optimizer_name, learning_rate, kwargs) in CASES.items():
        parameters = {name: torch.tensor(out[f"initial/{name}"], requires_grad=True) for name in initial}
        optimizer = OPTIMIZERS[optimizer_name](parameters.values(), lr=learning_rate, **kwargs)
        trace = {name: [] for name in initial}
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = torch.tensor(out[f"gradient/{name}"][step])
            optimizer.step()
            for name, parameter in parameters.items():
                trace[name].append(parameter.detach().numpy().copy())
        out |= {f"{case}/{name}": np.stack(values) for name, values in trace.items()}

    for max_norm in (0.5, 100.0):
        parameters = [torch.nn.Parameter(torch.tensor(out[f"initial/{name}"])) for name in initial]
        for name, parameter in zip(initial, parameters, strict=True):
            parameter.grad = torch.tensor(out[f"gradient/{name}"][0])
        out[f"clip/{max_norm}/norm"] = torch.nn.utils.clip_grad_norm_(parameters, max_norm).numpy()
        for name, parameter in zip(initial, parameters, strict=True):
            out[f"clip/{max_norm}/{name}"] = parameter.grad.numpy()

    for name, (class_name, kwargs) in SCHEDULES.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.02)
        schedule = getattr(torch.optim.lr_scheduler, class_name)(optimizer, **kwargs)
        rates = []
        for _ in range(9):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        out[f"schedule/{name}"] = np.array(rates)

    out["cases"] = np.array(json.dumps(CASES))
    out["schedules"] = np.array(json.dumps(SCHEDULES))
    out["torch_version"] = np.array(torch.__version__)
    np.savez_compressed(Path(__file__).with_name("torch_optim.npz"), **out)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
