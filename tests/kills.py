"""Processes that are killed, or whose disk is full, at a chosen moment of their writing."""

import os
import signal
import sys
import traceback
from pathlib import Path

import pytest


class Points:
    """The moments at which a process writes, syncs, renames or removes something below a folder.

    At one of them, counted from 1, something happens: a kill, or an error of the disk.
    """

    GROWING = ("os.rename", "os.mkdir", "os.link")  # for which a disk needs room
    EVENTS = (*GROWING, "os.rmdir", "os.remove", "shutil.rmtree")

    def __init__(self, folder, at, action, events=EVENTS):
        self.folder, self.at, self.action, self.events, self.count = str(folder), at, action, events, 0

    def passed(self):
        self.count += 1
        if self.count == self.at:
            self.action()

    def hook(self, event, args):
        if event == "ctypes.dlsym" and args[1] in ("renameat2", "renamex_np"):
            self.passed()
        writing = event == "open" and isinstance(args[1], str) and bool(set(args[1]) & set("wxa+"))
        if (writing or event in self.events) and any(self.is_ours(arg) for arg in args):
            self.passed()

    def is_ours(self, path):
        return isinstance(path, str | os.PathLike) and os.path.abspath(os.fspath(path)).startswith(self.folder)

    def watch(self):
        sys.addaudithook(self.hook)
        sync, write = os.fsync, Path.write_bytes

        def synced(descriptor):
            self.passed()
            sync(descriptor)

        def written(path, content):
            if self.count + 1 == self.at:  # half of it is there
                write(path, content[: len(content) // 2])
            self.passed()
            return write(path, content)

        os.fsync, Path.write_bytes = synced, written


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(work):
    """Run something in a fork; how that has ended."""
    child = os.fork()
    if not child:
        code = 70
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


needs_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forks")
