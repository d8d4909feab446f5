#!/bin/sh
# `deepspeed` with a hostfile, one host of which is spare: ./deepspeed.sh HOSTFILE [FLAGS OF THE SCRIPT]
# REMOTE_SHELL: what starts a program on a host, its name behind it (default: ssh, without a password).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
hostfile=$1
shift
exec flashrecovery run --standby 1 --spare-nodes "${SPARE_NODES:-1}" --remote-shell "${REMOTE_SHELL:-ssh}" -- \
    deepspeed --hostfile "$hostfile" "$here/../train_deepspeed.py" --zero 2 "$@"
