"""Export of FlashSAC's actor: the plain network is the trained one, in float64 and in every format."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exports import HERE
from tiny import tiny
from toy_policies import ORIGIN

from ejax.config import parse_config
from ejax.distributions import ActionSpec, action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies.flash import FlashActor, FlashQ
from ejax.run import train
from interop import verify
from interop.checkpoints.exported import read_export
from interop.checkpoints.weights import state_dict_from_params
from interop.export import export_policy, main
from interop.exporters.flash import actor_of, folded
from interop.exporters.record import policy_of
from interop.twin.kinds import spec_from_json, spec_to_json

torch = pytest.importorskip("torch")
interop_policy = pytest.importorskip("interop.policy")

SIZES: dict[str, Any] = {"actor_width": 8, "critic_width": 4, "num_blocks": 2, "expansion": 3, "num_bins": 5}
POLICY = FlashQ(ActionSpec("tanh_normal", (2,), (-2.0, -1.0), (2.0, 3.0)), **SIZES)
NUM_OBS, ROWS = 5, 64
OBS = np.random.default_rng(0).normal(scale=3.0, size=(ROWS, NUM_OBS))


def trained(policy: FlashQ, obs: Any) -> Any:
    """Draw parameters and statistics, variances above 0.2."""
    rng, shapes = np.random.default_rng(1), jax.eval_shape(policy.init, jax.random.key(0), obs)
    drawn = lambda x: jnp.asarray(rng.uniform(0.2, 1.0, x.shape) * rng.choice((-1.0, 1.0), x.shape), jnp.float32)  # noqa: E731
    params = {name: jax.tree.map(drawn, shapes[name]) for name in ("params", "batch_stats")}
    of_variance = lambda path, x: jnp.abs(x) if "variance" in str(path[-1]) else x  # noqa: E731
    return jax.tree_util.tree_map_with_path(of_variance, params)


@pytest.mark.parametrize("post_norm", [True, False])
def test_folding_changes_no_output_in_float64(post_norm: bool) -> None:
    policy = POLICY.clone(post_norm=post_norm)
    params = trained(policy, jnp.asarray(OBS, jnp.float32))
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        wanted, _ = jax.jit(policy.apply)(exact, OBS)
        got, _ = jax.jit(actor_of(policy).apply)(folded(policy, params), OBS)
    assert np.abs(wanted.base.mean).max() > 0.3 and np.ptp(wanted.base.log_std) > 0.3
    for name in ("mean", "log_std"):
        np.testing.assert_allclose(getattr(got.base, name), getattr(wanted.base, name), rtol=1e-12, atol=1e-12)


def test_its_weights_are_those_of_linear_layers_alone_and_come_back(tmp_path: Path) -> None:
    env, folder = PointMassRL(), tmp_path / "export"
    policy = POLICY.clone(action_spec=action_spec(env.action_space, squash=True))
    params = trained(policy, jax.tree.map(lambda x: x[None], env.reset(jax.random.key(0))[1]))
    export_policy(policy, params, env, folder, ["pt"], origin=ORIGIN)
    twin = interop_policy.load_policy(folder)
    linear = [name for name, module in twin.actor.named_modules() if isinstance(module, torch.nn.Linear)]
    assert linear == ["0", "1.0", "1.2", "2.0", "2.2", "4"]
    assert {name.rpartition(".")[0] for name in twin.state_dict()} == {f"actor.{name}" for name in linear}
    spec = spec_from_json(spec_to_json(twin.spec))
    assert spec == twin.spec
    again, weights = read_export(folder, env)  # as of a teacher
    assert again == policy_of(spec) == actor_of(policy)
    assert isinstance(again, FlashActor)
    for name, x in state_dict_from_params(again, weights).items():
        np.testing.assert_array_equal(x, twin.state_dict()[name].numpy())


@pytest.mark.slow
def test_a_trained_run_is_exported_and_verified_in_every_format(tmp_path: Path) -> None:
    config = tiny(iterations=8)
    config["policy"] = {"name": "flash_q", "squash_actions": True, "log_std_range": [-10.0, 2.0], "cfg": SIZES}
    cfg = {"batch_size": 16, "learning_starts": 64, "replay": {"capacity": 256}}
    config["algorithm"] = {"name": "flash_sac", "cfg": cfg}
    run = train(parse_config(config), run_dir=tmp_path / "run").run_dir
    assert main([str(run), "--to", str(tmp_path / "out"), "--formats", ",".join(HERE)]) == 0
    assert verify.main([str(tmp_path / "out"), "--trust"]) == 0
