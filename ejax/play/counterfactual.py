"""Play the same pictures under each of several instructions: what a policy goes for."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ejax.config import ConfigError, Problem
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.envs.wrappers.wrapper import EnvWrapper, innermost
from ejax.episodes import record_episodes
from ejax.logs.console import working
from ejax.numerics.text import as_bytes
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.schema.plain_files import read_text, to_json
from ejax.schema.writing import by_product, replace_file
from ejax.training.environments import build_env
from ejax.types import CameraView, HostEnv, Key, Params, Policy, PyTree, RenderableEnv

_SIZE = 240, 144
"""Width and height of a picture."""
_MAX_SCENES = 8


@dataclass(frozen=True)
class InstructedPolicy:
    """A policy that reads another text than the observation's: the second of its variables, uint8 [L]."""

    policy: Policy
    text: str

    def init(self, key: Key, obs: PyTree) -> Params:
        return self.policy.init(key, obs)

    def apply(self, params: Params, obs: PyTree, **options: Any) -> Any:
        own, text = params
        batch = obs[self.text].shape[:-1]
        return self.policy.apply(own, {**obs, self.text: jnp.broadcast_to(text, (*batch, len(text)))}, **options)


def read_sentences(given: Sequence[str]) -> list[str]:
    """Return sentences, and the lines of files among them, each once. ValueError: a file without any."""
    sentences: list[str] = []
    for each in given:
        if not (path := Path(each)).is_file():
            sentences.append(each)
        elif lines := [line.strip() for line in read_text(path).splitlines() if line.strip()]:
            sentences += lines
        else:
            raise ValueError(f"--counterfactual: {each} has no sentence; write one on each line")
    return list(dict.fromkeys(sentences))


def counterfactual_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    sentences: Sequence[str],
    num_episodes: int = 3,
    seed: int | None = None,
    **opened: Any,
) -> dict[str, Any]:
    """Play each sentence from the same starts, and write ``<run>/evaluations/<checkpoint>_counterfactual.json``.

    Args:
        sentences: or files with one on each line.
        num_episodes: the starts, at most 8.
        seed, opened: as in ``evaluate_run``, with its errors.

    Returns:
        ``outcomes`` [sentences][starts]: what the environment's ``ending(state)`` calls an episode's end; where it and
        the report are.

    Raises:
        ConfigError: the environment has no ``ending``, or cannot be drawn. ValueError: the policy reads no text of the
            observation; a sentence that it cannot read; too many starts.
    """
    sentences = read_sentences(sentences)
    if num_episodes > _MAX_SCENES:
        raise ValueError(f"--counterfactual draws at most {_MAX_SCENES} starts; got --episodes {num_episodes}")
    with opened_policy(run, overrides, **opened) as (directory, config, path):
        env: Any = build_env(config, phase="eval", num_envs=num_episodes)
        if isinstance(env, HostEnv) or not isinstance(env, RenderableEnv) or not hasattr(innermost(env), "ending"):
            text = f"{config.env.id} has no ending(state) or cannot be drawn; --counterfactual needs both"
            raise ConfigError([Problem("env.id", text)])
        policy, params = restore_policy(config, env, path)
        part = getattr(getattr(policy, "model", None), "text", None)
        if part is None or getattr(policy, "instruction", None) is not None:
            raise ValueError("--counterfactual: this policy reads no text of an observation")
        first_seed = config.trainer.eval_seed if seed is None else seed
        length = max(len(each.encode()) for each in sentences)
        instructed: Any = InstructedPolicy(policy, part)
        ending, view = cast("Any", env).ending, _view(env)
        starts, ends, outcomes = list[str](), list[list[str]](), list[list[str]]()
        for i, sentence in enumerate(sentences):
            with working(f"{i + 1} of {len(sentences)}: {sentence}"):
                given = params, jnp.asarray(as_bytes(sentence, length))
                key = jax.random.key(first_seed)
                played = record_episodes(instructed, env, given, key, num_envs=num_episodes)
                states, done = jax.device_get(played)
                last = np.where(done.any(axis=0), done.argmax(axis=0), len(done) - 1)
                rows = [jax.tree.map(lambda x, at=at, n=n: x[at, n], states) for n, at in enumerate(last)]
                outcomes.append([ending(state) for state in rows])
                ends.append([_picture(env, state, view) for state in rows])
                if not starts:
                    firsts = [jax.tree.map(lambda x, n=n: x[0, n], states) for n in range(num_episodes)]
                    starts = [_picture(env, state, view) for state in firsts]
        shown = {"sentences": sentences, "outcomes": outcomes, "starts": starts, "ends": ends}
        facts = {"checkpoint": str(path), "episodes": num_episodes * len(sentences), "seed": first_seed}
        facts |= {"overrides": list(overrides), "counterfactual": shown}
        report = directory.results / "evaluations" / f"{path.name}_counterfactual.json"
        with by_product("the report of these outcomes"):
            replace_file(report, to_json(facts, indent=2), directory.results)
        return {"sentences": sentences, "outcomes": outcomes, "report": report}


def _view(env: Any) -> CameraView | None:
    """Return the camera of the policy's pictures. None: the environment's own."""
    while isinstance(env, EnvWrapper):
        if isinstance(env, RenderedEnv):
            return env.view
        env = env.inner
    return None


def _picture(env: RenderableEnv, state: PyTree, view: CameraView | None) -> str:
    """Draw a state as a page has it: a PNG in base64."""
    from PIL import Image  # few evaluations draw

    file = io.BytesIO()
    Image.fromarray(env.render(state, *_SIZE, view)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
