"""SAC's gradient step beside the same step written in torch: parameters, target and Adam's moments."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policies import ORIGIN

from ejax.algorithms.replay_buffer import Transition
from ejax.algorithms.sac import ALGORITHM, SACConfig, sac_step
from ejax.distributions import ActionSpec, action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies.actor_q import ActorQ
from ejax.policies.mlp import NetworkConfig
from ejax.policies.normalize import update_normalizer
from ejax.policies.observations import flatten_observation
from ejax.rollout import reset
from ejax.types import init_train_state
from interop.export import export_policy

torch = pytest.importorskip("torch")
load_policy = pytest.importorskip("interop.policy").load_policy

OBS, ACTIONS, ROWS, STEPS = 5, 2, 16, 6
NETWORK = NetworkConfig(hidden_sizes=(12, 9), activation="relu")
HALF_WIDTH = np.array([0.5, 2.0], np.float32)
POLICY = ActorQ(
    ActionSpec("tanh_normal", (ACTIONS,), tuple((-HALF_WIDTH).tolist()), tuple(HALF_WIDTH.tolist())), NETWORK, NETWORK
)


def rows(seed: int) -> Transition:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return Transition(
        obs=normal(ROWS, OBS),
        action=jnp.asarray(rng.uniform(-1, 1, size=(ROWS, ACTIONS)) * HALF_WIDTH, jnp.float32),
        reward=normal(ROWS),
        next_obs=normal(ROWS, OBS),
        discount=jnp.asarray(0.99 * (rng.random(ROWS) < 0.8), jnp.float32),
    )


class TorchSAC:
    """The networks as torch's, in the order of Stable-Baselines3's update: entropy's weight, critics, actor, target."""

    def __init__(self, params: Any, rate: float) -> None:
        copy = lambda x: torch.tensor(np.asarray(x), requires_grad=True)  # noqa: E731
        self.actor, critic = ([jax.tree.map(copy, params[name])] for name in ("actor", "critic"))
        self.actor = self.actor[0]
        self.critics = [jax.tree.map(lambda x, i=i: copy(x.detach()[i]), critic[0]) for i in range(2)]
        self.targets = jax.tree.map(lambda x: x.detach().clone(), self.critics)
        self.log_alpha = copy(params["log_alpha"])
        adam = lambda tree: torch.optim.Adam(jax.tree.leaves(tree), lr=rate)  # noqa: E731
        self.of_actor, self.of_critics, self.of_alpha = map(adam, (self.actor, self.critics, self.log_alpha))

    def act(self, obs: Any, noise: Any) -> tuple[Any, Any]:
        mean, log_std = mlp(self.actor, obs).chunk(2, dim=-1)
        log_std = log_std.clamp(*POLICY.log_std_range)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * noise
        action = torch.tanh(u)
        # log(1 - tanh²u) without cancellation
        slope = 2.0 * (np.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
        return action, (normal.log_prob(u) - slope).sum(-1)

    def step(self, batch: dict[str, Any], noise: Any, next_noise: Any) -> None:
        action, log_prob = self.act(batch["obs"], noise)
        alpha = self.log_alpha.exp().detach()
        loss = -(self.log_alpha * (log_prob - ACTIONS).detach()).mean()
        self.of_alpha.zero_grad()
        loss.backward()
        self.of_alpha.step()
        with torch.no_grad():
            next_action, next_log_prob = self.act(batch["next_obs"], next_noise)
            following = torch.cat([batch["next_obs"], next_action], -1)
            q = torch.stack([mlp(each, following)[:, 0] for each in self.targets]).min(0).values
            y = batch["reward"] + batch["discount"] * (q - alpha * next_log_prob)
        seen = torch.cat([batch["obs"], batch["action"]], -1)
        loss = 0.5 * sum(torch.nn.functional.mse_loss(mlp(each, seen)[:, 0], y) for each in self.critics)
        self.of_critics.zero_grad()
        loss.backward()
        self.of_critics.step()
        drawn = torch.cat([batch["obs"], action], -1)
        q = torch.stack([mlp(each, drawn)[:, 0] for each in self.critics]).min(0).values
        self.of_actor.zero_grad()
        (alpha * log_prob - q).mean().backward()
        self.of_actor.step()
        with torch.no_grad():
            for old, new in zip(jax.tree.leaves(self.targets), jax.tree.leaves(self.critics), strict=True):
                old.mul_(1 - 0.005).add_(new, alpha=0.005)


def mlp(layers: Any, x: Any) -> Any:
    for i in range(3):
        x = x @ layers[f"linear_{i}"]["kernel"] + layers[f"linear_{i}"]["bias"]
        x = torch.relu(x) if i < 2 else x
    return x


def assert_same(ours: Any, theirs: Any) -> None:
    values = jax.tree.map(lambda x: x.detach().numpy(), theirs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5), ours, values)


def test_steps_are_torchs_with_adams_moments() -> None:
    config = SACConfig(learning_rate=3e-3, critic_optimizer={"learning_rate": 3e-3})
    optimizer = ALGORITHM.make_optimizer(config)
    state = init_train_state(POLICY, optimizer, jax.random.key(0), jnp.zeros((1, OBS)), target=True)
    peer = TorchSAC(state.params["params"], 3e-3)
    for i in range(STEPS):
        batch, key = rows(i), jax.random.key(100 + i)
        state, _ = sac_step(state, batch, key, policy=POLICY, optimizer=optimizer, config=config)
        next_noise, noise = (np.array(jax.random.normal(k, (ROWS, ACTIONS))) for k in jax.random.split(key))
        given = {name: torch.tensor(np.asarray(x)) for name, x in vars(batch).items()}
        given["action"] = given["action"] / torch.tensor(HALF_WIDTH)
        peer.step(given, torch.tensor(noise), torch.tensor(next_noise))

    params, target = state.params["params"], state.target["params"]
    assert_same(params["actor"], peer.actor)
    assert_same(params["log_alpha"], peer.log_alpha)
    for i in range(2):
        one = lambda tree, i=i: jax.tree.map(lambda x: x[i], tree["critic"])  # noqa: E731
        assert_same(one(params), peer.critics[i])
        assert_same(one(target), peer.targets[i])
        moments = state.opt_state["critic"][0]
        assert_same(one(moments.mu), jax.tree.map(lambda x: peer.of_critics.state[x]["exp_avg"], peer.critics[i]))
        assert_same(one(moments.nu), jax.tree.map(lambda x: peer.of_critics.state[x]["exp_avg_sq"], peer.critics[i]))
    moments = state.opt_state["actor"][0]
    assert_same(moments.mu["actor"], jax.tree.map(lambda x: peer.of_actor.state[x]["exp_avg"], peer.actor))
    assert_same(moments.nu["log_alpha"], peer.of_alpha.state[peer.log_alpha]["exp_avg_sq"])


@pytest.mark.slow
def test_the_actor_is_exported_as_an_mlp_of_the_same_actions(tmp_path: Path) -> None:
    """In float64 on the host: the means of the whole actor, squashed, and the exported policy's answers."""
    env, normalized = PointMassRL(), POLICY.clone(actor_obs_normalization=True, critic_obs_normalization=True)
    policy = normalized.clone(action_spec=action_spec(env.action_space, squash=True))
    envs = reset(env, jax.random.key(0), 64)
    params = policy.init(jax.random.key(1), envs.obs)
    params = update_normalizer(policy, params, jax.tree.map(lambda x: x[None], envs.obs))
    export_policy(policy, params, env, tmp_path / "export", ["pt"], origin=ORIGIN)

    obs = np.asarray(flatten_observation(envs.obs), np.float64)
    actor, statistics = params["params"]["actor"], params["normalizer"]["actor_obs_normalizer"]
    # the export holds the deviation, rounded to float32
    deviation = np.sqrt(np.asarray(statistics["variance"])).astype(np.float64)
    x = (obs - np.asarray(statistics["mean"], np.float64)) / (deviation + 1e-2)
    for i in range(3):
        x = x @ np.asarray(actor[f"linear_{i}"]["kernel"], np.float64) + np.asarray(actor[f"linear_{i}"]["bias"])
        x = np.maximum(x, 0.0) if i < 2 else x
    low, high = env.action_space.low, env.action_space.high
    wanted = (low + high) / 2 + (high - low) / 2 * np.tanh(x[:, : low.shape[0]])
    twin = load_policy(tmp_path / "export").double()
    answer = twin.act(jax.tree.map(lambda x: torch.tensor(np.asarray(x, np.float64)), envs.obs))
    np.testing.assert_allclose(np.asarray(answer), wanted, rtol=1e-12, atol=1e-12)
