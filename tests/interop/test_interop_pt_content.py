"""Content that no version of EmbodiChain writes: named by its key, never a traceback, never run."""

import argparse
import copy
import json
import os
import pickle
import random
import traceback
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.config import RunConfig, parse_config
from ejax.training.build import build
from ejax.training.parts import Parts

torch = pytest.importorskip("torch", reason="checkpoints of EmbodiChain are torch's")
hostile_files = pytest.importorskip("hostile_files")
pt_file = pytest.importorskip("interop.checkpoints.file")
pt_state = pytest.importorskip("interop.checkpoints.state")

ROOT = Path(__file__).parents[2]
POINT_MASS = ROOT / "tests/golden/embodichain_0_3_point_mass.pt"
NUM_MUTANTS = int(os.environ.get("PT_MUTANTS", "200"))


@pytest.fixture(scope="module")
def golden() -> tuple[RunConfig, Parts, dict[str, Any]]:
    """Return the config of the golden training, its parts, and the content of its file."""
    with np.load(POINT_MASS.with_suffix(".npz")) as file:
        raw = json.loads(str(file["config"]))
    raw |= {"compat": "embodichain-0.3", "trainer": {**raw["trainer"], "console": False}}
    config = parse_config(raw)
    return config, build(config), torch.load(POINT_MASS, weights_only=True)


def read(file: Path, config: RunConfig, parts: Parts) -> None:
    """Read a .pt in every way: to continue its training, to start from its policy, to write one like it."""
    for policy_only in (False, True):
        pt_state.read_state(file, config, parts, policy_only=policy_only)
    meta = {"global_step": 0, "num_updates": 0, "best_eval_value": None}
    pt_state.pt_payload(config, parts, parts.state, meta, like=file)


def itself() -> Any:
    x: dict[str, Any] = {}
    x["itself"] = x
    return x


def odd_values() -> list[Any]:
    return [
        *(None, True, 0, 3, -1, 2**40, 10**5000, 0.5, float("nan"), float("inf"), "", "text", "x" * 100_000, b"bytes"),
        *([], [1], [["a"]], (), (1, 2), {}, {"a": 1}, {3: 4}, {None: [1]}, set(), OrderedDict(a=1), Counter("aab")),
        *([itself()], [[[[[]]]]], 1j, torch.float32, torch.Size([2]), torch.device("cpu")),
        torch.zeros(()),
        torch.zeros(0),
        torch.full((3, 2), torch.nan),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e5m2),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        torch.zeros(1).expand(10**14),
        torch.zeros(2, device="meta"),
        torch.nn.Parameter(torch.zeros(2)),
    ]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, about kinds of tensors that few use
    ODD = odd_values()


def places(tree: Any, depth: int, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places of every value in nested dicts, lists and tuples down to this depth; of lists, the first four."""
    if len(path) == depth:
        items = []
    elif isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))[:4]
    else:
        items = []
    return [path, *(place for name, x in items for place in places(x, depth, (*path, name)))]


def replaced(tree: Any, path: tuple[Any, ...], change: Any) -> Any:
    """Copy with ``change`` (of the value there; ``KeyError`` takes it away) at that place."""
    if not path:
        return change(tree)
    made = list(tree) if isinstance(tree, tuple) else copy.copy(tree)
    try:
        made[path[0]] = replaced(tree[path[0]], path[1:], change)
    except KeyError:
        del made[path[0]]
    return tuple(made) if isinstance(tree, tuple) else made


def change_of(rng: random.Random, *, removes: bool) -> Any:
    def change(x: Any) -> Any:
        kind = rng.randrange(6)
        if kind == 0 and removes:
            raise KeyError
        if kind == 1 and isinstance(x, dict):
            return {**x, rng.choice([0, "more", None, ("a",)]): rng.choice(ODD)}
        if kind == 2 and isinstance(x, torch.Tensor) and x.layout is torch.strided and 0 < x.numel() < 10**6:
            return rng.choice(
                [x[None], x.flatten(), x.double(), x.int(), x.bool(), x.to(torch.bfloat16), x * torch.inf]
            )
        if kind == 2 and isinstance(x, list):
            return rng.choice([[*x, *x], x[:-1], tuple(x), dict(enumerate(x))])
        return rng.choice(ODD)

    return change


def mutant(payload: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.choice(places(payload, rng.choice((1, 2, 3, 4, 5))))
        payload = replaced(payload, place, change_of(rng, removes=bool(place)))
    return payload


def fault(error: Exception) -> str | None:
    """Return what is wrong with an error; None: a ValueError that ejax raises on purpose and a person can read."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    meant = Path(last.filename).is_relative_to(ROOT) and "raise " in (last.line or "")
    if not isinstance(error, ValueError) or not meant or not 20 < len(str(error)) < 2_000:
        return f"{last.filename}:{last.lineno} {last.line}: {type(error).__name__} {str(error)[:300]}"
    return None


def run_mutants(count: int, golden: Any, tmp_path: Path, seed: int = 0) -> list[str]:
    config, parts, payload = golden
    faults = []
    for i in range(count):
        rng = random.Random(f"{seed}/{i}")
        torch.save(mutant(payload, rng), tmp_path / "mutant.pt")
        try:
            read(tmp_path / "mutant.pt", config, parts)
        except Exception as error:
            if found := fault(error):
                faults.append(f"{i}: {found}")
    return faults


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mutants_of_a_file_end_in_an_error_that_names_the_key(golden: Any, tmp_path: Path) -> None:
    assert run_mutants(NUM_MUTANTS, golden, tmp_path) == []


@pytest.mark.filterwarnings("ignore")
def test_bytes_that_change_end_in_an_error_or_change_nothing(golden: Any, tmp_path: Path) -> None:
    """In torch's zip files a checksum finds them; its older format has none, so what they hold is checked alone."""
    config, parts, payload = golden
    file, faults = tmp_path / "mutant.pt", []
    for new_format in (True, False):
        torch.save(payload, file, _use_new_zipfile_serialization=new_format)
        content = file.read_bytes()
        for i in range(NUM_MUTANTS // 4):
            rng = random.Random(i)
            changed = bytearray(content)
            start = rng.randrange(len(content) if new_format else content.index(b"storage"))
            changed[start : start + rng.choice((1, 1, 8))] = rng.randbytes(rng.choice((0, 1, 1, 8)))
            file.write_bytes(changed)
            try:
                read(file, config, parts)
            except Exception as error:
                if found := fault(error):
                    faults.append(f"{new_format}/{i}: {found}")
    assert faults == []


@pytest.mark.filterwarnings("ignore")
def test_no_hostile_file_runs_code(tmp_path: Path) -> None:
    marker, file = tmp_path / "ran", tmp_path / "a.pt"
    hostile = hostile_files.pickled(marker)
    hostile_files.write_torchscript(file, marker)
    hostile["TorchScript"] = file.read_bytes()
    for kind, content in hostile.items():
        file.write_bytes(content)
        if kind != "TorchScript":
            torch.load(file, weights_only=False) if kind.startswith("torch") else pickle.loads(content)
        else:
            torch.jit.load(file)
        assert marker.exists(), f"{kind} is not hostile"
        marker.unlink()
        refused(pt_file.read_pt, file, match=r"holds more than tensors and plain data|not a torch file")
        assert not marker.exists(), kind


def test_containers_that_hold_themselves_or_unfold_without_end_are_refused(tmp_path: Path) -> None:
    unfolding: Any = [0]
    for _ in range(30):
        unfolding = [unfolding] * 10
    for odd in (itself(), unfolding):
        torch.save({"global_step": 0, "policy": {}, "metadata": {"context": odd}}, tmp_path / "a.pt")
        refused(pt_file.read_pt, tmp_path / "a.pt", word="contain themselves")


def renamed(rename: Any) -> Any:
    return lambda content: content | {"policy": {rename(name): x for name, x in content["policy"].items()}}


def read_params(content: Any, golden: Any, file: Path) -> Any:
    config, parts, _ = golden
    torch.save(content, file)
    state, _ = pt_state.read_state(file, config, parts, policy_only=True)
    return [np.asarray(x) for x in jax.tree.leaves(state.train.params)]


WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "data parallel": lambda name: f"module.{name}",
    "compiled, then data parallel": lambda name: f"module._orig_mod.{name}",
    "data parallel, then compiled": lambda name: f"_orig_mod.module.{name}",
    "fully sharded": lambda name: f"_fsdp_wrapped_module.{name}",
    "the actor compiled": lambda name: name.replace("actor.", "actor._orig_mod."),
    "the actor data parallel": lambda name: name.replace("actor.", "actor.module."),
    "a part": lambda name: f"module.{name}" if name.startswith("actor") else name,
    "of Lightning": lambda name: f"model.{name}",
    "of Lightning, compiled": lambda name: f"model._orig_mod.{name}",
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_policy_of_a_wrapped_module_is_read(kind: str, golden: Any, tmp_path: Path) -> None:
    content = golden[2]
    wanted, found = (
        read_params(each, golden, tmp_path / "a.pt") for each in (content, renamed(WRAPPED[kind])(content))
    )
    for x, y in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(x, y)


@cases(
    "change text",
    (lambda x: x | {"best_eval_value": np.float64(0.5)}, "numpy.* key 'best_eval_value'.*float"),
    (lambda x: x | {"global_step": np.int64(5)}, "numpy.* key 'global_step'.*float"),
    (lambda x: x | {"done": np.bool_(True)}, "numpy.* key 'done'"),
    (lambda x: x | {"history": {"reward": np.arange(5.0)}}, "numpy.* key 'reward'.*tolist"),
    (lambda x: x | {"policy": {"w": np.zeros(3, np.float32)}}, "numpy.* key 'w'"),
    (lambda x: x | {"hyper_parameters": argparse.Namespace(a=1)}, "argparse.Namespace, at the key 'hyper_parameters'"),
    (lambda x: x | {"policy": torch.nn.Linear(2, 2)}, "Linear, at the key 'policy'.*state_dict"),
    (lambda x: torch.nn.Linear(2, 2), "Linear.*state_dict"),
    (lambda x: {"state_dict": x["policy"], "global_step": 1}, "'policy' is missing.*state_dict.*torch.save"),
    (lambda x: x["policy"], "is missing.*torch.save"),
    (lambda x: x | {"policy": x["policy"] | {"module.log_std": x["policy"]["log_std"]}}, "prefix of a wrapped module"),
    (lambda x: x | {"policy": x["policy"] | {"log_std": 0.5}}, "'policy.log_std'"),
    (lambda x: x | {"policy": x["policy"] | {"log_std": torch.eye(2).to_sparse()}}, "'policy.log_std'"),
    (lambda x: x | {"policy": {name: y.double() for name, y in x["policy"].items()}}, "is float64"),
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_file_may_not_hold_is_named_by_key_and_remedy(
    change: Any, text: str, golden: Any, tmp_path: Path
) -> None:
    refused(lambda: read_params(change(golden[2]), golden, tmp_path / "a.pt"), match=text)


def test_the_place_is_named_in_torchs_older_format_too(golden: Any, tmp_path: Path) -> None:
    torch.save(golden[2] | {"x": np.float64(1.0)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    refused(pt_file.read_pt, tmp_path / "a.pt", key="numpy", word="Save only tensors and plain values")


@cases(
    "kind",
    lambda x: x.to(torch.bfloat16).float(),
    lambda x: torch.nn.Parameter(x),
    lambda x: torch.stack([x, x])[1],
    lambda x: x.t().contiguous().t() if x.ndim == 2 else x,
    ids=["rounded", "Parameter", "view", "transposed"],
)
def test_tensors_of_any_layout_are_read(kind: Any, golden: Any, tmp_path: Path) -> None:
    content = golden[2]
    tensors = OrderedDict((name, kind(x) if x.is_floating_point() else x) for name, x in content["policy"].items())
    plain = {name: x.detach().clone().contiguous() for name, x in tensors.items()}
    wanted, found = (read_params(content | {"policy": each}, golden, tmp_path / "a.pt") for each in (plain, tensors))
    for x, y in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_weights_of_a_wrapped_module_are_read_by_their_own_names(ending: str, tmp_path: Path) -> None:
    from ejax.policies.pretrained.weights import load_weights

    file, tensors = (
        tmp_path / f"a{ending}",
        {"module._orig_mod.a.weight": torch.ones(2), "module.model.b": torch.zeros(1)},
    )
    if ending == ".pt":
        torch.save(tensors, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, file)
    assert load_weights(file).keys() == {"a.weight", "model.b"}
