"""Training runs of several processes, without the imports of each: `python tests/ranks.py '[[4, ["--max_iters=3"]], ...]'`.

Each job is [processes, arguments of train.py, or bench.py and its own]. They run one after the other, in forks of this process that
see what torchrun would tell them; the first failure is the exit status.
"""

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402


def fork(rank, world, port, argv):
    pid = os.fork()
    if pid:
        return pid
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                                              **address}.items()})  # fmt: skip
    sys.argv[1:] = argv
    try:
        if argv[:1] == ["bench.py"]:
            import bench  # which most jobs do not need

            sys.argv[1:] = argv[1:]
            configurator.run(bench.main)
        else:
            configurator.run(train.main)
        status = 0
    except SystemExit as e:
        status = e.code
    except BaseException as e:
        print(f"rank {rank}: {type(e).__name__}: {e}", file=sys.stderr)
        status = 1
    sys.stderr.flush()
    os._exit(status or 0)


def main(jobs):
    torch.set_num_threads(1)
    for world, argv in jobs:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [fork(rank, world, port, argv) for rank in range(world)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        if any(statuses):
            sys.exit(max(statuses))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
