"""The page of ``ejax play --web``: its JavaScript answers as JAX does, it loads nothing, and what it cannot do is
refused. The physics in the page is tried where npm's build of it is: ``npm install @mujoco/mujoco`` in the checkout."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import EPISODE

from ejax.distributions import ActionSpec
from ejax.envs.locomotion.velocity import VelocityRL
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.push import PushCube
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.play.__main__ import main
from ejax.policies import ActorCritic, NetworkConfig
from ejax.policies.actor_q import ActorQ
from ejax.policies.recurrence import MemoryConfig
from ejax.policies.with_memory import ActorCriticWithMemory
from interop.artefacts.episode import reference_episode
from interop.web import page
from interop.web.page import describe_task

WEB = Path(page.__file__).parent
WASM = Path(__file__).parents[2] / "node_modules" / "@mujoco" / "mujoco"
ENV = PushCubeRL(episode_length=EPISODE)
NETWORK = NetworkConfig(hidden_sizes=(9, 7), activation="elu")
NORMAL = ActionSpec("normal", (6,))
POLICY = ActorCritic(NORMAL, NETWORK, NETWORK, actor_obs_normalization=True)
OBS = np.random.default_rng(0).normal(size=(64, 15)).astype(np.float32)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")


def weights(policy: Any) -> Any:
    params = jax.jit(policy.init)(jax.random.key(1), OBS[:1])
    if "normalizer" in params:
        mean, variance = OBS.mean(axis=0), 4.0 * OBS.var(axis=0)
        params["normalizer"]["actor_obs_normalizer"] |= {"mean": mean, "variance": variance}
    return params


def node(program: str, **given: Any) -> Any:
    scripts = "".join((WEB / name).read_text() for name in ("policy.js", "task.js"))
    head = "const given = JSON.parse(require('fs').readFileSync(0));"
    done = subprocess.run(
        ["node", "-e", scripts + head + program], input=json.dumps(given), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow_cases("layernorm", "squashed")
@needs_node
@cases(
    "policy",
    POLICY,
    ActorCritic(NORMAL, NetworkConfig(hidden_sizes=(9, 7), activation="gelu", use_layernorm=True), NETWORK),
    ActorCritic(NORMAL, NetworkConfig(hidden_sizes=(9,), activation="silu", last_activation="tanh"), NETWORK),
    ActorQ(ActionSpec("tanh_normal", (6,), (-0.5,) * 6, (2.0,) * 6), NETWORK, NETWORK),
    ids=["normalized", "layernorm", "last_activation", "squashed"],
)
def test_the_policy_in_javascript_acts_as_in_jax(policy: Any) -> None:
    params = weights(policy)
    expected = policy.apply(params, OBS)[0].mode()
    program = "const act = makePolicy(given.policy); console.log(JSON.stringify(given.obs.map(x => [...act(x)])));"
    actions = node(program, policy=page._policy(policy, params, ENV, "obs"), obs=OBS.tolist())
    np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=2e-6)


@needs_node
def test_velocities_and_gravity_are_seen_in_the_base_s_frame() -> None:
    half = 0.5**0.5
    program = """
    const sim = { data: { qpos: given.qpos, qvel: [1, 2, 3, 4, 5, 6] } };
    const names = ["base_lin_vel", "base_ang_vel", "projected_gravity"];
    console.log(JSON.stringify(names.map(name => Array.from(TERMS[name](sim, {})))));"""
    yawed = node(program, qpos=[0, 0, 1, half, 0, 0, half])
    np.testing.assert_allclose(yawed, [[2, -1, 3], [4, 5, 6], [0, 0, -1]], atol=1e-12)
    rolled = node(program, qpos=[0, 0, 1, half, half, 0, 0])
    np.testing.assert_allclose(rolled, [[1, 3, -2], [4, 5, 6], [0, -1, 0]], atol=1e-12)


@pytest.mark.slow
def test_the_page_s_episode_is_that_of_the_export() -> None:
    params = weights(POLICY)
    shown, exported = page.page_data(POLICY, params, ENV, 5)["episode"], reference_episode(POLICY, ENV, params, 5)
    assert exported is not None and shown["start"] == exported["start"]
    assert {name: shown["result"][name] for name in ("return", "length")} == pytest.approx(
        {name: exported["result"][name] for name in ("return", "length")}
    )


def test_the_page_is_whole_and_names_no_address() -> None:
    html = page.assemble({"title": "</script><b>"}, {"js": b"program", "wasm": b"code"})
    assert "{{" not in html and "</script><b>" not in html
    assert not re.findall(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", html)
    assert "default-src 'none'" in html and html.count("<script") == html.count("</script>") == 7


@pytest.mark.slow
@needs_node
@pytest.mark.skipif(not WASM.is_dir(), reason="there is no node_modules/@mujoco/mujoco")
@cases(
    "env",
    ENV,
    PushCube(episode_length=60, start_range=(1.0, 1.0)),
    VelocityRL(max_episode_steps=60, encoder_bias=0.1, push=None),
    ids=["cube", "push", "legs"],
)
def test_the_page_plays_jax_s_episode_again(env: Any) -> None:
    policy = POLICY
    if isinstance(env, VelocityRL):
        groups = {"actor_obs_groups": ("policy",), "critic_obs_groups": ("critic",)}
        policy = ActorCritic(ActionSpec("normal", (12,)), NETWORK, NETWORK, **groups)
    params = policy.init(jax.random.key(1), jax.tree.map(lambda x: x[None], env.reset(jax.random.key(0))[1]))
    program = """
    import(given.engine).then(async ({ default: load }) => {
      const sim = new Simulation(await load(), given.task), rows = {};
      for (const [name, packed] of Object.entries(given.steps)) rows[name] = unpack(packed);
      console.log(JSON.stringify(await prove(sim, makePolicy(given.policy), rows)));
    });"""
    worst = node(program, engine=str(WASM / "mujoco.js"), **page.page_data(policy, params, env, 5))
    assert worst["length"] == env.max_episode_steps
    assert max(worst["action"], worst["observation"]) < 1e-5 and worst["step"] < 1e-5 and worst["second"] < 1e-3


@cases(
    "env text",
    (CartPoleRL(), "cannot compute the observation of CartPoleRL in a browser; it can those of PushCube"),
    (VelocityRL(terrain={"kind": "rough"}), "flat ground only, got terrain.kind 'rough'"),
)
def test_a_task_that_the_page_cannot_compute_is_refused(env: Any, text: str) -> None:
    refused(describe_task, env, match=re.escape(text))


def test_a_policy_that_is_no_mlp_is_refused() -> None:
    memory = ActorCriticWithMemory(NORMAL, NETWORK, MemoryConfig(type="gru", hidden_size=4))
    with pytest.raises(ValueError, match=r"MLPs of .* only, .* policy is of the class ActorCriticWithMemory"):
        page._policy(memory, {}, ENV, "obs")


@cases(
    "options text",
    ("--web page.txt", "a page is written as .html"),
    ("--web page.html --wasm .", "there is none in .: npm install @mujoco/mujoco, then pass --wasm node_modules"),
    ("--web page.html --push 1 --speed 2", "--web takes no --speed, --push"),
    ("--wasm .", "--wasm goes with --web"),
)
def test_an_option_that_cannot_be_followed_is_refused(
    options: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *options.split()]) == 2
    assert text in capsys.readouterr().err
