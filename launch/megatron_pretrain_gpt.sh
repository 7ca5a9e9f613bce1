#!/usr/bin/env bash
# A small GPT with Megatron-LM's own pretrain_gpt.py, trained with basis rotation in a pipeline without flushes. Nothing of Megatron-LM
# is edited. Arguments are passed on to pretrain_gpt.py and win over those below.
#
#   MEGATRON_PATH  a checkout of Megatron-LM, core 0.16, or 0.18 and newer (required)
#   CONFIG         the file that chooses optimizer and schedule (default: megatron_config/basis_rotation.json beside this script)
#   GPUS           processes on this machine (default: all GPUs; PIPELINE of them or a multiple)
#   PIPELINE       pipeline stages (default: 2)
#   DATA_PATH      prefix of .bin and .idx files (default: mock data)
#   RUN_DIR        checkpoints and the cache of data indices (default: runs/megatron)
#   PYTHON         the interpreter with Megatron-LM's requirements and ds_basisrot (default: python3)
#   WITHIN         a module and its arguments that runs megatron_patches, such as a profiler: "-m module" (default: none)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
stop() { printf 'megatron_pretrain_gpt.sh: error: %s\n' "$*" >&2; exit 2; }

for argument in "$@"; do
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then
        sed -n '2,/^set /{/^#/p}' "${BASH_SOURCE[0]}" | cut -c 3-
        exit 0
    fi
done

python="${PYTHON:-python3}"
[ -n "${MEGATRON_PATH:-}" ] || stop "MEGATRON_PATH is not set: give a checkout of Megatron-LM (tag core_v0.16.1)"
[ -f "$MEGATRON_PATH/pretrain_gpt.py" ] || stop "MEGATRON_PATH: no pretrain_gpt.py in $MEGATRON_PATH"
config="$(realpath "${CONFIG:-$here/megatron_config/basis_rotation.json}")"
[ -f "$config" ] || stop "CONFIG: no such file: $config"
"$python" -c 'import ds_basisrot, megatron_patches' 2>/dev/null || stop "$python has no ds_basisrot: pip install it there (or set PYTHON)"
stages="${PIPELINE:-2}"
processes="${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}"
[ "$processes" -gt 0 ] || stop "no GPU found: set GPUS"
[ $((processes % stages)) -eq 0 ] || stop "GPUS: $processes processes cannot be divided among $stages stages; set GPUS or PIPELINE"
if [ -n "${DATA_PATH:-}" ]; then
    data=(--data-path "$(realpath -m "$DATA_PATH")")
else
    data=(--mock-data)
fi
mkdir -p "${RUN_DIR:-runs/megatron}"
run_dir="$(realpath "${RUN_DIR:-runs/megatron}")"
read -r -a within <<<"${WITHIN:-}"

export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
cd "$MEGATRON_PATH"
exec "$python" -m torch.distributed.run --nproc_per_node "$processes" --master_addr 127.0.0.1 --master_port "${MASTER_PORT:-29500}" \
    "${within[@]}" -m megatron_patches --basisrot-config "$config" pretrain_gpt.py \
    "${data[@]}" --tokenizer-type NullTokenizer --vocab-size 50256 --split 98,1,1 --data-cache-path "$run_dir/cache" \
    --pipeline-model-parallel-size "$stages" --bf16 \
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 \
    --position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm \
    --micro-batch-size 4 --global-batch-size 64 --train-iters 1000 --eval-interval 200 --eval-iters 10 --log-interval 10 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 50 --weight-decay 0.1 --clip-grad 1.0 \
    --rerun-mode disabled --ckpt-format torch_dist --save "$run_dir/checkpoints" --load "$run_dir/checkpoints" --save-interval 200 "$@"
