#!/usr/bin/env bash
# Set up .venv and run every check: format, lint, types, tests. Needs Python >= 3.11, nothing else.
# Usage: bash tests/check.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ejax needs Python >= 3.11; $python is $("$python" --version). Set PYTHON to one that is." >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# --no-compile: of 11,000 files few are ever imported, and those are compiled then
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev,docs]'

.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict  # into build/site
.venv/bin/python -m pytest --numprocesses auto --dist loadfile "$@"
