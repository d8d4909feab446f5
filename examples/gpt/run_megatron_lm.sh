#!/usr/bin/env bash
# An unmodified checkout of Megatron-LM (core_v0.16.1, 0.20-dev) with --flash-recovery: a rank is killed in the middle.
#
#   examples/gpt/run_megatron_lm.sh CHECKOUT [RUN_DIR] [more flags of pretrain_gpt.py]
#
# NPROC=4           ranks
# KILL=...          the fault, as `flashrecovery run --inject` takes it; empty: none
# OPTIONS=...       more options of `flashrecovery run`
#
# Without a GPU (nvidia-smi), FR_MEGATRON_CPU=1 is set and the model is a tiny one on Megatron's own mock data.
set -euo pipefail

checkout=$(realpath "${1:?usage: $0 CHECKOUT [RUN_DIR] [flags]}")
run_dir=$(realpath -m "${2:-runs/megatron-lm}")
shift $(($# < 2 ? $# : 2))
nproc=${NPROC:-4}
kill=${KILL-rank=1,fault=sigkill,at=backward,step=6}

if ! command -v nvidia-smi > /dev/null; then
    export FR_MEGATRON_CPU=1
    device=(--use-cpu-initialization --distributed-backend gloo)
fi
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

cd "$checkout" # data set indices are kept below it
exec flashrecovery run --nproc-per-node "$nproc" --standby 1 --run-dir "$run_dir" \
    ${kill:+--inject "$kill"} ${OPTIONS:-} "$checkout/pretrain_gpt.py" \
    --flash-recovery --flash-recovery-digest \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --micro-batch-size 2 --global-batch-size $((4 * nproc)) --train-iters 12 \
    --lr 3e-3 --min-lr 1e-4 --lr-warmup-iters 1 --lr-decay-style cosine \
    --hidden-dropout 0.1 --attention-dropout 0.1 --position-embedding-type rope --disable-bias-linear \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 \
    --transformer-impl local --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion \
    --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm \
    --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0 "${device[@]}" "$@"
