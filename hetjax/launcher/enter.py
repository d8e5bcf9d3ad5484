"""What a worker's process does first: takes its share of the processor, then becomes the command.

    python -I -S enter.py PARENT CORES GROUP COMMAND …

Run as a file of its own and not as code between fork and exec. For the launcher has threads, and
what runs after a fork of a threaded process may block for ever. Standard library only.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, cores: str, group: str, command: list[str]) -> None:
    """Never returns: becomes `command`, or ends with exit code 2 and a message.

    Args:
        parent: process id of the launcher; this process ends when the launcher does.
        cores: numbers with commas between them, or "" for any.
        group: the file that takes a process into its group, or "" for none.
        command: the program and its arguments.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # the launcher died before this process asked to die with it
    try:
        if group:
            with open(group, "w") as file:
                file.write(str(os.getpid()))
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    except OSError as error:
        print(f"this worker cannot take its CPU share: {error}", file=sys.stderr)
        sys.exit(2)
    # A launcher in the background of a shell has SIGINT ignored, and Python ignores SIGPIPE. What
    # nohup and the like ignore stays so.
    for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
