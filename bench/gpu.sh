#!/usr/bin/env bash
# Decoding and training on a CUDA card, at most 8 minutes: bench/gpu.sh [options of bench/gpu.py]
# PYTHON is an interpreter with stepladder and a CUDA build of torch. Writes bench/results/gpu.md and gpu.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,clocks.max.sm --format=csv,noheader
PYTHONPATH=. exec timeout --signal=INT 480 "$python" bench/gpu.py "$@"
