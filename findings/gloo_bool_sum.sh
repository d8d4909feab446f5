#!/usr/bin/env bash
# torch 2.13.0, gloo: a sum of bools adds their bytes, and does not make them 0 or 1 again.
#
# dist.all_reduce(flags) of torch.bool, the usual way to say "on any rank", leaves the number of ranks in each byte. The
# tensor still prints True and is equal to one of True by torch.equal(), but its bytes differ, and clone() changes them.
# A flag that is summed again in each step grows, and a byte wraps: two ranks that both say True say False after eight sums.
#
# Seen (torch 2.13.0, two ranks on one host):
#   after 1 sums: bytes 2, clone 1, value True, equal to True: True
#   after 8 sums: bytes 0, clone 0, value False, equal to True: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/sum.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist

store = f"file://{sys.argv[2]}"
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2)
flag = torch.ones(1, dtype=torch.bool)
for count in range(1, 9):
    dist.all_reduce(flag)
    if count in (1, 8):
        was, clone = flag.view(torch.uint8).item(), flag.clone().view(torch.uint8).item()
        same = torch.equal(flag, torch.ones(1, dtype=torch.bool))
        print(f"after {count} sums: bytes {was}, clone {clone}, value {flag.item()}, equal to True: {same}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/sum.py" 1 "$folder/store" > "$folder/other" 2> /dev/null &
other=$!
found=$("$folder/venv/bin/python" "$folder/sum.py" 0 "$folder/store" 2> /dev/null)
wait "$other"
expected='after 1 sums: bytes 2, clone 1, value True, equal to True: True
after 8 sums: bytes 0, clone 0, value False, equal to True: False'
echo "$found"
[ "$found" = "$expected" ] && [ "$(cat "$folder/other")" = "$expected" ]
