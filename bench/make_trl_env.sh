#!/usr/bin/env bash
# An environment with the peer library for bench/vs_trl.py, so that stepladder never depends on it.
# Usage: bench/make_trl_env.sh DIR [PYTHON]
# With PYTHON, an interpreter that has torch, transformers and accelerate, the new environment is stacked on its
# packages, so that both sides compute with the same torch and nothing big is fetched; without it all is fetched.
set -euo pipefail
dir=${1:?usage: bench/make_trl_env.sh DIR [PYTHON]}
base=${2:-}
test -x "$dir/bin/python" || "${base:-python3}" -m venv "$dir"
pip() { "$dir/bin/python" -m pip install --disable-pip-version-check -q "$@"; }
if [ -n "$base" ]; then
  site=$("$dir/bin/python" -c 'import site; print(site.getsitepackages()[0])')
  "$base" -c 'import site; print("\n".join(site.getsitepackages()))' > "$site/stacked.pth"
  pip --no-deps "trl==1.16.0"
  pip "datasets>=4.7" "accelerate>=1.4"
else
  pip "trl==1.16.0" "torch==2.13.0"
fi
"$dir/bin/python" - <<'PY'
import datasets, torch, transformers, trl
for module in (trl, torch, transformers, datasets):
    print(module.__name__, module.__version__)
PY
