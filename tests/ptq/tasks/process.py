"""One process of a run, as a program: its tasks write files, and it can be told to go wrong.

Usage: process.py FOLDER ADDRESS ROLE [NAME=VALUE ...]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from jaxmoe.errors import JaxMoeError, WeightsError
from jaxmoe.ptq.tasks.link import Link
from jaxmoe.ptq.tasks.run import run_tasks
from jaxmoe.ptq.tasks.task import Task


def grid(layers: int, width: int, content: str = "") -> list[Task]:
    """Layers of tasks, each of which reads two of the layer before."""
    return [
        Task(
            name=f"layer {layer} part {part}",
            reads=frozenset(f"{layer - 1}.{(part + side) % width}" for side in (0, 1)) if layer else frozenset(),
            writes=frozenset({f"{layer}.{part}"}),
            cost=float(part),
            stage=0,
            content=content,
        )
        for layer in range(layers)
        for part in range(width)
    ]


def main() -> None:
    folder, address, role = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = dict(argument.split("=") for argument in sys.argv[4:])
    seconds = float(options.get("seconds", "0.02"))
    tasks = grid(int(options.get("layers", "5")), int(options.get("width", "8")), options.get("content", ""))

    def execute(task: Task, slot: int) -> None:
        """Writes a file whose bytes depend on those of all files that the task reads."""
        (folder / f"started {task.name} {os.getpid()}").touch()
        if task.name == options.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if task.name == options.get("fail"):
            raise WeightsError("tensor w is cut short")
        time.sleep(seconds)
        texts = [(folder / name).read_text() for name in sorted(task.reads)]
        (name,) = task.writes
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_text(f"{name}({hash_of(texts)})")
        part.replace(folder / name)

    processes = int(options["processes"]) if "processes" in options else None
    link = Link(
        address=address, serve=role == "serve", processes=processes, join_s=float(options.get("join", "20")),
        timeout_s=float(options.get("timeout", "10")),
    )  # fmt: skip
    reported: list[str] = []
    try:
        summary = run_tasks(
            tasks, execute, range(int(options.get("workers", "2"))), link=link,
            lease_s=float(options.get("lease", "30")), on_done=lambda task, seconds: reported.append(task.name),
        )  # fmt: skip
    except JaxMoeError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error), "reported": reported}))
        sys.exit(2)
    except KeyboardInterrupt:
        print(json.dumps({"error": "KeyboardInterrupt", "reported": reported}))
        sys.exit(130)
    shares = {share.worker: share.tasks for share in summary.shares}
    print(json.dumps({"text": summary.text(), "here": summary.tasks_here, "reported": reported, "shares": shares}))


def hash_of(texts: list[str]) -> int:
    """A number that is the same in every process."""
    return sum((index + 1) * byte for text in texts for index, byte in enumerate(text.encode())) % 1_000_003


if __name__ == "__main__":
    main()
