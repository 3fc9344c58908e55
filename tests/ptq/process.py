"""One of two processes of a quantisation, as a program, with short leases.

Usage: process.py SOURCE OUT ADDRESS serve|help [DIES]; it kills itself with a task that is written and not recorded:
its DIES-th one, or a later one, as soon as the other process has recorded some.
"""

import functools
import os
import signal
import sys
from pathlib import Path

import jax

from jaxmoe.ptq import quantize as module
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.ptq.tasks.link import Link

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)


def main() -> None:
    source, out, address, role = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    dies = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    write, own = module.write_text_atomic, [0]

    def record(path: Path, text: str) -> None:
        if path.parent.name == "tasks":
            # Its own ones may still be on their way to their final names: never more than there are.
            theirs = len(list(path.parent.glob("*.json"))) - own[0]
            own[0] += 1
            if own[0] >= dies and theirs > 0:
                os.kill(os.getpid(), signal.SIGKILL)
        write(path, text)

    if dies:
        module.write_text_atomic = record
    module.run_tasks = functools.partial(module.run_tasks, lease_s=3.0)
    link = Link(address=address, serve=role == "serve", processes=2)
    ended = module.quantize(prepare(source, load_recipe("w8a8-g128")), out, devices=jax.devices(), link=link)
    print(f"here {ended.summary.tasks_here} of {ended.summary.tasks}")


if __name__ == "__main__":
    main()
