#!/usr/bin/env bash
# one-gpu COMMAND...: run a command on one GPU that no other container here has taken.
#
# Compose gives every replica of a service the same devices, so that `--scale worker=4` would put four
# engines on GPU 0. Here each takes the lock of one GPU, in a volume that all of them mount. The lock is
# held by an open file, which lives exactly as long as the process.
set -eu
locks=${GPU_LOCKS:-/run/gpu-locks}

for gpu in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
  exec 9> "$locks/$gpu"
  if flock --nonblock 9; then
    export CUDA_VISIBLE_DEVICES=$gpu
    exec "$@"
  fi
done
echo "one-gpu: every GPU of this machine has a worker" >&2
exit 2
