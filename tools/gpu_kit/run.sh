#!/bin/bash
# Prove and measure on a machine with a GPU: unpack the kit, set the environment, and run its parts.
#     bash tools/gpu_kit/run.sh .gpu_kit [--device cpu|npu] [PART | PART/JOB ...]
# From the root of the checkout. What is found is in $OUT after each job. A second call, while the machine is warm, unpacks
# nothing and runs the working tree as it is then. KIT_WORK, KIT_PYTHON, KIT_SECONDS and KIT_COMMIT change what they say.
set -u
fail() { echo "gpu_kit: $1" >&2; exit 2; }

KIT_BEGAN=$(date +%s)
kit=${1:?say where the kit is, such as .gpu_kit}; shift
export KIT_BEGAN KIT_WORK=${KIT_WORK:-$PWD/build/gpu_kit/cuda}
export OUT=${OUT:-$KIT_WORK/out}
python=${KIT_PYTHON:-python3} site=$KIT_WORK/site
mkdir -p "$KIT_WORK" "$OUT" 2>/dev/null || fail "cannot make $KIT_WORK and $OUT: is the disk full?"

# The working tree first, so that what was changed is what runs. Its folders `tools` and `tests` are no regular packages, and
# one of that name, which some wheels leave behind, would hide them: so they are made such.
for name in tools tests; do
    mkdir -p "$KIT_WORK/names/$name" && echo "__path__ = ['$PWD/$name']" > "$KIT_WORK/names/$name/__init__.py" ||
        fail "cannot write to $KIT_WORK"
done
export PYTHONPATH=$KIT_WORK/names:$PWD:$site
"$python" -m tools.gpu_kit.unpack "$site" --kit "$kit" > /dev/null || exit 2
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export TRITON_CACHE_DIR=$KIT_WORK/triton TORCHINDUCTOR_CACHE_DIR=$KIT_WORK/inductor VLLM_CACHE_ROOT=$KIT_WORK/vllm
# FlashInfer, which the kit does not carry, is otherwise imported for its sampler.
export VLLM_USE_FLASHINFER_SAMPLER=0
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO}
export VLLM_ASCEND_ENABLE_DBO=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1
exec "$python" -m tools.gpu_kit.runner "$@"
