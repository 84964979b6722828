#!/usr/bin/env bash
# Build the manual as a site, into build/site.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
