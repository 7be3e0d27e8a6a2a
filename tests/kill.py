"""A training run that is killed again and again: `python tests/kill.py [kills]`, 50 unless told otherwise.

Each life is a process that gets SIGKILL at a random moment, while it saves at every step; the next one resumes. At the end the
weights, the moments and the curves must be those of a run that nobody killed, bit for bit.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import curve, flags, prepare_tiny, same, weights  # noqa: E402

import checkpoint  # noqa: E402
import train  # noqa: E402

STEPS_A_LIFE = 12  # at most, of those it prints before it is killed


def live(argv):
    """Train in a forked process, which has its imports already: (process id, its output)."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        os.dup2(writable, 1)
        os.dup2(writable, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        status = 1
        try:
            train.main(argv)
            status = 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", flush=True)
        os._exit(status)
    os.close(writable)
    return pid, open(readable)


def main(kills=50, seed=0):
    torch.set_num_threads(1)
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    steps = kills * STEPS_A_LIFE
    dataset = prepare_tiny(folder / "data", shards=2)
    common = [
        f"--max_iters={steps}",
        "--dropout=0.1",
        "--log_interval=1",
        "--save_interval=1",
        "--eval_interval=7",
        "--keep_last=2",
    ]

    pid, output = live(flags(dataset, folder / "whole", *common))
    text = output.read()
    assert os.waitpid(pid, 0)[1] == 0, text

    run, killed, saving, at_once = folder / "killed", 0, 0, 0
    while True:
        try:
            argv = [f"--resume={checkpoint.resolve(run).parent}"]
        except checkpoint.ConfigError:  # killed before its first save
            argv = flags(dataset, run, *common, "--overwrite")
        pid, output = live(argv)
        if killed < kills:
            if chance.random() < 0.2:
                at_once += 1
            else:
                for _ in range(chance.randint(1, STEPS_A_LIFE)):
                    while (line := output.readline()) and not line.startswith("step"):
                        assert "Error" not in line, line
            time.sleep(chance.random() * 0.03)
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            assert os.WIFSIGNALED(status), f"life {killed} ended by itself: {output.read()}"
            killed += 1
            saving += any(run.glob(".step-*"))
        else:
            text = output.read()
            assert os.waitpid(pid, 0)[1] == 0, text
            break
    moments = [load_file(checkpoint.resolve(folder / name) / "optimizer.safetensors") for name in ("whole", "killed")]
    assert same(weights(folder / "whole"), weights(run)) and same(*moments)
    for name in ("loss", "grad_norm", "val_loss"):
        assert curve(folder / "whole", name) == curve(run, name)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    print(
        f"{killed} kills, {saving} while a checkpoint was being written, {at_once} at the start of a life: {steps} steps, all equal"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
