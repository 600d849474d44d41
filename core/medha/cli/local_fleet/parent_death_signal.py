"""Run a program that the kernel kills with its parent.

    python -I -S parent_death_signal.py PID PROGRAM ARG…

Sets the parent-death signal (SIGKILL), then replaces this process by the program. PID is the
parent's: if the parent has already exited, the program does not start. Only Linux has this signal;
elsewhere the program just starts.
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
            sys.exit("the parent process has exited")
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
