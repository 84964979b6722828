"""Your own training loop around ejax's jitted functions: PPO on PointMass, without the trainer.

python examples/own_loop.py
"""

import jax

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.distributions import action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.evaluation import evaluate, summarize
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import ActorCritic, NetworkConfig
from ejax.rollout import reset, unroll
from ejax.types import init_train_state


def main(num_updates: int = 100) -> float:
    """Train, and return the mean reward of an episode afterwards."""
    env = PointMassRL(success_bonus=5.0)
    network = NetworkConfig(hidden_sizes=(64, 64), activation="tanh")
    policy = ActorCritic(action_spec(env.action_space), actor=network, critic=network, initial_log_std=-1.0)
    config = PPOConfig(batch_size=2048, optimizer=OptimizerConfig(learning_rate=1e-3))
    optimizer = make_optimizer(config.optimizer)

    key = jax.random.key(0)
    envs = reset(env, jax.random.fold_in(key, 0), num_envs=64)
    state = init_train_state(policy, optimizer, jax.random.fold_in(key, 1), envs.obs)

    for i in range(num_updates):
        key_collect, key_update = jax.random.split(jax.random.fold_in(key, 2 + i))
        rollout, envs = unroll(policy, env, state.params, envs, key_collect, num_steps=128)
        state, metrics = ppo_update(state, rollout, key_update, policy=policy, optimizer=optimizer, config=config)
        if i % 20 == 19:
            print(f"update {i + 1}: reward {rollout.reward.mean():.3f} a step, loss {metrics['loss']:.3f}")

    scores = summarize(evaluate(policy, env, state.params, jax.random.key(1), num_envs=64, num_episodes=64))
    print({name: round(float(x), 3) for name, x in scores.items()})
    return float(scores["eval/avg_reward"])


if __name__ == "__main__":
    main()
