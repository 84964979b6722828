"""The task of an exported policy, made from the export alone: used by the deployment examples.

``contract.json`` names the environment and what the policy reads; ``episode.json`` the seed of the episode that the
export holds. PushCube, as its observation of 15 numbers has it, runs in plain MuJoCo, without jax and ejax; all other
tasks are ejax's own environments, those outside JAX (``gymnasium:CartPole-v1``) included, and need ejax. Where what the
task needs is not installed, the policy answers the observations of the export instead.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Act = Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]
"""Arrays [1, ...] by the contract's names, without a memory -> action [1, A], or a choice [1]."""


class Task(Protocol):
    def observe(self) -> Mapping[str, NDArray[Any]]: ...
    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        """Return the reward, and whether the episode has ended."""

    def result(self) -> Mapping[str, float]:
        """Report ``success`` and ``metrics/<name>`` after the last step, where the task has them."""


class EjaxTask:
    """One environment of ejax, from the start of ``ejax evaluate RUN --episodes 1 --seed SEED``.

    One outside JAX starts from the seed itself. A run's ``trainer.events`` are not in its contract: they stay out.
    """

    def __init__(self, contract: Mapping[str, Any], seed: int) -> None:
        import jax

        from ejax.config.models import EnvConfig
        from ejax.rollout import reset, step
        from ejax.training.environments import make_env
        from ejax.types import HostEnv

        named = EnvConfig(**{key: contract["env"][key] for key in EnvConfig.model_fields if key in contract["env"]})
        env = make_env(named.id, named.cfg, num_envs=1, wrappers=named.layers)
        self._inputs = [entry for entry in contract["observation"] if entry["name"] != "memory"]
        self._info: Mapping[str, Any] = {}
        if isinstance(env, HostEnv):
            self._obs = env.reset(np.array([seed], np.uint32))
            self._advance: Callable[[Any], Any] = env.step
            return
        key_reset, key_steps = jax.random.split(jax.random.key(seed))
        carry, steps = reset(env, key_reset, 1), 0
        one_step = jax.jit(step, static_argnames="env")

        def advance(action: Any) -> Any:
            nonlocal carry, steps
            carry, timestep = one_step(env, carry, action, jax.random.fold_in(key_steps, steps))
            steps += 1
            return timestep

        self._obs, self._advance = carry.obs, advance
        for _ in range(2):  # compile now, so that no control step waits for it
            self.step(np.zeros((1, *env.action_space.shape), env.action_space.dtype))
        carry, steps = reset(env, key_reset, 1), 0
        self._obs = carry.obs

    def observe(self) -> Mapping[str, NDArray[Any]]:
        return {entry["name"]: _part(self._obs, entry) for entry in self._inputs}

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        timestep = self._advance(action)
        self._obs, self._info = timestep.final_obs, timestep.info  # an episode's last one, not the next one's first
        return float(timestep.reward[0]), bool(timestep.terminated[0] | timestep.truncated[0])

    def result(self) -> Mapping[str, float]:
        metrics = {f"metrics/{name}": x for name, x in self._info.get("metrics", {}).items()}
        known = {"success": self._info["success"], **metrics} if "success" in self._info else metrics
        return {name: float(x[0]) for name, x in known.items() if np.ndim(x[0]) == 0}


def make_task(contract: Mapping[str, Any], episode: Mapping[str, Any] | None) -> Task:
    """Make the task at the start of the export's episode; without one, of seed 0.

    Raises:
        ValueError: the policy reads text. ModuleNotFoundError: what the task needs is not installed.
    """
    if any("text" in entry for entry in contract["observation"]):
        raise ValueError("this policy reads text: drive it with examples/deploy_vla.py")
    names = [entry["name"] for entry in contract["observation"] if entry["name"] != "memory"]
    plain = names == ["obs"] and "entries" not in contract["observation"][0] and "chunk" not in contract["action"]
    if contract["env"]["id"] == "PushCubeRL" and plain and episode is not None:
        from push_cube_mujoco import PushCube

        return PushCube(contract, episode["start"])
    return EjaxTask(contract, 0 if episode is None else episode["seed"])


def play(directory: Path, act: Act) -> None:
    """Play an export's episode with its policy, and print the return, beside that of JAX where the export has it.

    The two differ by rounding: the policies answer within a few float32 steps of each other, and the task is the same
    program. In PushCube an error e of the action moves a joint by action_scale·e rad for the rest of the episode.
    """
    contract = json.loads((directory / "contract.json").read_text())
    file = directory / "episode.json"
    episode = json.loads(file.read_text()) if file.exists() else None
    try:
        task = make_task(contract, episode)
    except ModuleNotFoundError as error:
        print(f"the task is not played: {error.name} is not installed. The export's own observations instead:")
        print(answer_recorded(directory, contract, act))
        return
    limit = contract["env"]["max_episode_steps"] or 1000
    episode_return, length, ended = 0.0, 0, False
    while length < limit and not ended:
        reward, ended = task.step(act(task.observe()))
        episode_return, length = episode_return + reward, length + 1
    print(_line({"return": episode_return, "length": length, **task.result()}))
    if episode is not None:
        print(f"by JAX {_line(episode['result'])}")


def answer_recorded(directory: Path, contract: Mapping[str, Any], act: Act, most: int = 256) -> str:
    """Let the policy answer observations of ``observations.npz``, of one with memory an episode's, as JAX did."""
    names = [entry["name"] for entry in contract["observation"]]
    case = "consecutive" if "memory" in names else "environment"
    with np.load(directory / "observations.npz", allow_pickle=False) as file:
        obs = {name: file[f"{case}/observation/{name}"][:most] for name in names}
        expected = file[f"{case}/expected/action"][:most]
    memory = obs.pop("memory", None)
    rows = range(len(expected))
    if memory is not None:  # zeros are the start of the next episode, of which ``act`` hears nothing
        rows = range(next((i for i in rows[1:] if not memory[i].any()), len(rows)))
    answers = [np.asarray(act({name: x[i : i + 1] for name, x in obs.items()})) for i in rows]
    error = np.abs(np.stack(answers).reshape(len(rows), -1) - expected[: len(rows)].reshape(len(rows), -1)).max()
    return f"{len(rows)} observations, largest difference from JAX's actions {error:.1e}"


def _part(obs: Any, entry: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array at an input's dotted path, as the contract has it."""
    if isinstance(obs, Mapping):
        for name in [entry["name"]] if entry["name"] in obs else entry["name"].split("."):
            obs = obs[name]
    x = np.asarray(obs, entry["dtype"])
    return x[..., entry["entries"]] if "entries" in entry else x


def _line(result: Mapping[str, float | None]) -> str:
    """Write a result in one line: those numbers first that every task has."""
    words = []
    for name in sorted(result, key=lambda name: ("metrics/" in name, name == "success", name != "return", name)):
        value = result[name]
        if value is None or name == "nonfinite" or value != value:
            continue
        shown = str(bool(value)) if name == "success" else f"{value:.0f}" if name == "length" else f"{value:.5f}"
        words.append(f"{name.removeprefix('metrics/')} {shown}")
    return "  ".join(words)
