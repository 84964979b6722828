"""Proximal policy optimization."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ejax.optim import OptimizerConfig, ScheduleConfig


class PPOConfig(BaseModel):
    """``algorithm.cfg`` of ``ppo``: EmbodiChain's names, and its 0.2.4 defaults unless a comment says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    n_epochs: PositiveInt = 10
    batch_size: PositiveInt = 64
    """Rows of one minibatch; the last one of an epoch may be smaller."""
    num_mini_batches: PositiveInt | None = None
    """Instead of ``batch_size``: this many minibatches of equal size (the last may be smaller)."""
    clip_coef: PositiveFloat = 0.2
    ent_coef: NonNegativeFloat = 0.01
    vf_coef: NonNegativeFloat = 0.5
    max_grad_norm: PositiveFloat = 0.5
    clip_grad_per_network: bool = False
    """EmbodiChain 0.3: clip the critic's gradient apart from the rest."""
    use_clipped_value_loss: bool = False
    action_bound_coef: NonNegativeFloat = 0.0
    """Weight of mean Σ_a max(|mean action| − 1, 0)²: keeps an unsquashed Gaussian inside the actions' range."""
    normalize_advantage: bool = True
    normalize_advantage_per_mini_batch: bool = False
    schedule: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: the learning rate follows ``desired_kl``; excludes ``lr_scheduler``."""
    desired_kl: PositiveFloat | None = None
    minimum_learning_rate: PositiveFloat = 1e-5
    maximum_learning_rate: PositiveFloat = 1e-2
    target_kl: PositiveFloat | None = None
    """Stop the update's remaining minibatches once their approximate KL exceeds 1.5 · target_kl."""
    reward_scale: PositiveFloat = 1.0
    timeout_bootstrap: Literal["exact", "embodichain", "embodichain-0.2", "embodichain-0.3"] = "exact"
    """Where an episode is only cut off: ``exact`` bootstraps from the true final observation, ``embodichain``
    (= ``embodichain-0.2``) from nothing, ``embodichain-0.3`` adds γ·V of the observation before the step."""
    skip_nonfinite_updates: bool = True
    """Leave parameters and optimizer as they are when a minibatch gives a NaN or infinite gradient, and count it;
    False: training stops with FloatingPointError."""
