"""Options from Python as from a file, by EmbodiChain's names."""

from typing import Any

import pytest
from case_tables import cases, refused
from helpers.small_configs import make

from ejax.algorithms.apg import APGConfig
from ejax.algorithms.bc import BCConfig
from ejax.algorithms.distill import DistillConfig
from ejax.algorithms.grpo import GRPOConfig
from ejax.algorithms.options import GradientOptions
from ejax.algorithms.ppo import PPOConfig
from ejax.algorithms.shac import SHACConfig
from ejax.optim import OptimizerConfig

ALL: list[type[Any]] = [PPOConfig, GRPOConfig, APGConfig, SHACConfig, BCConfig, DistillConfig]


@pytest.mark.parametrize("options", ALL, ids=lambda x: x.__name__)
def test_a_learning_rate_is_the_optimizers(options: type[Any]) -> None:
    made = options(learning_rate=0.01)
    assert made == options(optimizer=OptimizerConfig(learning_rate=0.01)) and made.learning_rate == 0.01
    assert isinstance(made, GradientOptions)
    assert made.replace(learning_rate=0.02, max_grad_norm=2.0) == options(learning_rate=0.02, max_grad_norm=2.0)


@cases(
    "cfg",
    {"batch_size": 32, "learning_rate": 1e-3},
    {"batch_size": 32, "learning_rate": 1e-3, "optimizer": {"name": "sgd"}},
    {"batch_size": 32, "learning_rate": 1e-3, "optimizer": None},
    {"batch_size": 32, "lr_scheduler": {"name": "linear"}, "learning_rate": 1},
    ids=str,
)
def test_python_reads_what_a_file_reads(cfg: dict[str, Any]) -> None:
    assert PPOConfig(**cfg) == make(algorithm={"name": "ppo", "cfg": cfg}).algorithm.cfg


def test_a_learning_rate_beside_an_optimizers_other_fields_leaves_them() -> None:
    optimizer = OptimizerConfig.model_validate({"name": "sgd", "kwargs": {"momentum": 0.9}})
    made = PPOConfig(learning_rate=0.01, optimizer=optimizer)
    assert made.optimizer == optimizer.replace(learning_rate=0.01)


@cases(
    "cfg text",
    ({"device": "cuda"}, r"device belongs to the run; pass Trainer\(\.\.\., device=\.\.\.\) instead"),
    ({"learning_rate": 1e-3, "optimizer": {"learning_rate": 1e-2}}, "learning_rate means the same as optimizer"),
    ({"learning_rate": "fast"}, r"optimizer\.learning_rate\n.*valid number"),
    ({"learning_rate": 1e-3, "optimizer": "adam"}, r"optimizer\n.*valid dictionary"),
    ({"learning_rat": 1e-3}, r"learning_rat\n.*not permitted"),
    ids=["device", "twice", "no number", "no section", "unknown"],
)
def test_options_that_cannot_be_honoured_are_refused(cfg: dict[str, Any], text: str) -> None:
    refused(PPOConfig, **cfg, match=text)


def test_an_option_without_effect_is_announced() -> None:
    options: dict[str, Any] = {"gae_lambda": 0.9}
    with pytest.warns(UserWarning, match="gae_lambda: no effect on GRPOConfig; leave it out") as seen:
        assert GRPOConfig(**options) == GRPOConfig()
    assert seen[0].filename == __file__
    assert PPOConfig(**options).gae_lambda == 0.9
