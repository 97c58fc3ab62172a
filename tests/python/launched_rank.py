"""What one rank of a real launcher does in test_launchers: joins, reports, gathers; no pytest."""

from __future__ import annotations

import json
import os
import sys

import torch
from shardfield.distributed import DistributedManager, all_gather_v


def listening(port: str) -> list[str]:
    """Addresses of this host that something listens on at this port, in hexadecimal."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                _, local, _, state = line.split()[:4]
                address, number = local.split(":")
                if state == "0A" and int(number, 16) == int(port):
                    found.append(address)
    return found


def main(folder: str) -> None:
    torch.set_num_threads(1)
    DistributedManager.initialize()
    dm = DistributedManager()
    if os.environ.get("FAILING_RANK") == str(dm.rank):
        raise ValueError("the user's own words")
    dm.initialize_mesh((-1,), ("domain",))
    x = torch.full((dm.rank + 1,), float(dm.rank))
    whole = all_gather_v(x, [r + 1 for r in range(dm.world_size)], group="domain")
    report = {
        "rank": dm.rank,
        "world_size": dm.world_size,
        "local_rank": dm.local_rank,
        "launcher": dm.launcher,
        "device": dm.device.type,
        "listening": listening(os.environ.get("MASTER_PORT", "0")),
        "whole": whole.tolist(),
    }
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
        json.dump(report, file)
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main(sys.argv[1])
