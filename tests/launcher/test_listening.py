"""Runs of one machine listen for processes of this machine alone, whatever its name resolves to."""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from tests.launcher import launches

LOOPBACK = {  # as /proc/net has 127.0.0.1, in IPv6 too, and ::1
    "0100007F": "127.0.0.1",
    "0000000000000000FFFF00000100007F": "127.0.0.1",
    "00000000000000000000000001000000": "::1",
}
PROGRAM = """
import os, pathlib, hetjax
hetjax.join_processes()
import numpy as np, optax
def listens(pid):
    links = [os.readlink(file) for file in pathlib.Path(f"/proc/{pid}/fd").iterdir()
             if file.is_symlink()]
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            own, state, inode = (line.split()[k] for k in (1, 3, 9))
            if f"socket:[{inode}]" in links and (state == "0A" or "udp" in kind):
                yield own.partition(":")[0]
hetjax.fit(lambda w, batch, rng: (batch["x"] @ w) ** 2, np.zeros(4, np.float32), optax.sgd(0.1),
           {"x": np.ones((64, 4), np.float32)}, epochs=2, microbatch_size=4, budget=4,
           progress=False)
print("listens", *listens(os.getpid()), *listens(os.getppid()))
"""


def own_address():
    """One that other machines may know; where there is none, that of Debian's `/etc/hosts`."""
    with socket.socket(type=socket.SOCK_DGRAM) as found, contextlib.suppress(OSError):
        found.connect(("192.0.2.1", 9))  # nothing is sent
        return found.getsockname()[0]
    return "127.0.1.1"


@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare, of util-linux")
@pytest.mark.parametrize(
    ("flags", "least"),
    [((), 3), (("--runtime=apart",), 0)],  # the coordinator, and Gloo in each process
    ids=["joined", "apart"],
)
def test_local_runs_listen_at_loopback_alone(flags, least, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{own_address()} {socket.gethostname()}\n")
    launcher = [sys.executable, "-m", "hetjax.launch", "--workers=2", "--max_restarts=0", *flags]
    mount = shlex.join(["mount", "--bind", str(hosts), "/etc/hosts"])
    command = shlex.join([*launcher, "--", sys.executable, "-c", PROGRAM])
    ran = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && exec {command}"],
        cwd=launches.ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=launches.PATIENCE_SECS,
        check=False,
    )
    if "unshare failed" in ran.stderr or ran.stderr.startswith("mount:"):
        pytest.skip(f"namespaces are not permitted here: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr
    told = re.findall(r"listens(.*)", ran.stdout)
    listening = [address for line in told for address in line.split()]
    assert len(told) == 2, ran.stdout
    assert len(listening) >= least
    assert {LOOPBACK.get(address, address) for address in listening} <= {"127.0.0.1", "::1"}
