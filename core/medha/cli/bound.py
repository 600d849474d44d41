"""Run a program whose life is bound to its starter's: `python -I -S bound.py PID PROGRAM ARG…`.

Asks the kernel to kill this process when its parent dies, however that happens, then becomes the
program. PID is the parent's, so that a parent already gone is noticed. Linux only; elsewhere the
program just starts.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the starter is gone")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
