"""One rank under torchrun that is killed once and goes on from its checkpoint; no pytest."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from shardfield.distributed import DistributedManager
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Shard

from shardfield.checkpoint import load_sharded, save_sharded

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))
from fault_injection import STEPS, Net, sample

KILLED_IN = 2


def main(folder: str) -> None:
    torch.set_num_threads(1)
    DistributedManager.initialize(timeout=timedelta(seconds=20))
    dm = DistributedManager()
    mesh = dm.initialize_mesh((-1,), ("domain",))
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = {"net": net, "optimizer": optimizer, "step": -1}
    saved = os.path.join(folder, "saved")
    if os.path.exists(saved):
        state = load_sharded(saved, state)
    first = state["step"] + 1
    x, t = (shard_tensor(part, mesh, [Shard(2)]) for part in sample())
    for step in range(first, STEPS):
        if step == KILLED_IN and restarts == 0 and dm.rank == 1:
            net.mix.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        F.mse_loss(net(x), t).backward()
        optimizer.step()
        optimizer.zero_grad()
        save_sharded(saved, {"net": net, "optimizer": optimizer, "step": step})
    told = {
        "restarts": restarts,
        "resumed_at": first,
        "parameters": {name: value.tolist() for name, value in net.state_dict().items()},
    }
    Path(folder, f"rank{dm.rank}.json").write_text(json.dumps(told))
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main(sys.argv[1])
