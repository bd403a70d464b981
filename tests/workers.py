"""Two processes of gloo that run many cases one after another, each a function of a module of tests.

One start of two processes serves a whole module: it is most of the time of such tests.  What a case returns on each
rank, or the error that it raises there, is handed back; a rank that does not answer within the limit is a failure.
"""

import datetime
import importlib
import sys
import time
import traceback

import torch
import torch.multiprocessing as multiprocessing

RANKS = 2
# with what a first optimizer imports, of torch and of the library
PRELOADED = ["torch", "torch._dynamo", "torchngvi.fitting", "torchngvi.methods", "torchngvi.models"]
LIMIT = 20.0  # seconds of a group, and of an answer


def _serve(rank, store, module, requests, answers, path, limit):
    sys.path[:0] = [p for p in path if p not in sys.path]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=limit),
    )
    answers.put((rank, "ready", None, 0.0))
    while (request := requests.get()) is not None:
        name, arguments = request
        *other, name = name.split(".")
        functions = importlib.import_module(*other or [module])  # before the clock
        began = time.perf_counter()
        try:
            answer = ("value", getattr(functions, name)(rank, *arguments))
        except (Exception, KeyboardInterrupt) as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        answers.put((rank, *answer, time.perf_counter() - began))
    torch.distributed.destroy_process_group()


class Ranks:
    """Two processes, to which `run` gives one case after another."""

    def __init__(self, module, folder, limit=LIMIT):
        self.limit = limit
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)  # imported once, for both
        self.answers = context.Queue()
        self.requests = [context.Queue() for _ in range(RANKS)]
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, str(folder / "store"), module, self.requests[rank], self.answers, sys.path, limit),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()
        self._collect(60.0)

    def _collect(self, limit):
        found = {}
        while len(found) < RANKS:
            rank, *answer = self.answers.get(timeout=limit)
            found[rank] = answer
        return [found[rank] for rank in range(RANKS)]

    def run(self, name, *arguments):
        """The values of a case on the ranks, or the first error; and how long it took.

        The name is that of a function of the module of the pool, or has that of another in front, "module.function".
        """
        for queue in self.requests:
            queue.put((name, arguments))
        return self._collect(2 * self.limit)

    def values(self, name, *arguments):
        found = self.run(name, *arguments)
        for rank, (kind, value, _) in enumerate(found):
            assert kind == "value", f"rank {rank}: {value[2]}"
        return [value for _, value, _ in found]

    def errors(self, name, *arguments):
        """The type and the text of what was raised on each rank, and the longest time."""
        found = self.run(name, *arguments)
        assert [kind for kind, _, _ in found] == ["error"] * RANKS, found
        return [value[:2] for _, value, _ in found], max(seconds for _, _, seconds in found)

    def stop(self):
        for queue in self.requests:
            queue.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
