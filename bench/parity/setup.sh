#!/usr/bin/env bash
# Makes an environment of its own with the peer library, so that stepladder never depends on it.
# Usage: bench/parity/setup.sh DIR [extra pip arguments, for example --index-url of a CPU build of torch]
set -euo pipefail
dir=${1:?usage: bench/parity/setup.sh DIR [pip arguments]}
shift
test -x "$dir/bin/python" || python3 -m venv "$dir"
"$dir/bin/pip" install --disable-pip-version-check -q "torch==2.13.0" "trl==1.16.0" "jaxtyping>=0.3" "$@"
"$dir/bin/python" -c 'import torch, trl; print("torch", torch.__version__, "trl", trl.__version__)'
