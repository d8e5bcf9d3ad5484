"""Elastic runs over Ray with its token and with TLS; who has not the right one is refused."""

import contextlib
import os
import re
import secrets
import socket
import ssl
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engines
ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'hetjax[ray]'")
PATIENCE_SECS = 120
PROGRAM = """
import os, sys
import numpy as np, optax, ray
import hetjax
from ray import cluster_utils

def train():
    x = np.ones((64, 4), np.float32)
    loss = lambda w, batch, rng: (batch["x"] @ w - 1) ** 2
    settings = {"epochs": 2, "microbatch_size": 4, "budget": 4, "progress": False}
    return hetjax.fit(loss, np.zeros(4, np.float32), optax.sgd(0.1), {"x": x}, **settings)

if "RAY_ADDRESS" not in os.environ:
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
    cluster = cluster_utils.Cluster(head_node_args=head, initialize_head=True)
    os.environ["RAY_ADDRESS"] = cluster.address
result = hetjax.ray.launch(train, [{"CPU": 1}] * 2, elastic=True, min_workers=2)
print("missing", result.summary["examples_missing"], "at", os.environ["RAY_ADDRESS"], flush=True)
sys.stdin.read()
ray.shutdown()
cluster.shutdown()
"""


@contextlib.contextmanager
def trained(variables):
    """Runs the program on a cluster of its own; HOST:PORT of it, as long as the context lasts."""
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as running:
        told = next(line for line in running.stdout if "missing" in line)
        yield re.match(r"missing 0 at (\S+)", told)[1]
        running.communicate(timeout=PATIENCE_SECS)
    assert running.returncode == 0


def test_a_token_runs_and_a_wrong_one_is_refused_by_name():
    right, wrong = (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)} for _ in range(2)
    )
    with trained(right) as address:
        variables = os.environ | wrong | {"RAY_ADDRESS": address, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", PROGRAM]
        options = {"env": variables, "capture_output": True, "text": True, "check": False}
        said = subprocess.run(command, timeout=PATIENCE_SECS, **options).stderr
    assert f"ValueError: launch: Ray at {address} refuses the token" in said
    assert "token is missing or incorrect" in said


def certified(directory, address):
    """What Ray is told of certificates of an authority that is made for the test."""
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
    (directory / "names").write_text(f"subjectAltName=IP:{address},IP:127.0.0.1")
    new, key = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"], ["-subj", "/CN=hetjax"]
    for command in (
        [*new, "-x509", "-keyout", "ca.key", "-out", "ca.crt", *key],
        [*new, "-keyout", "node.key", "-out", "node.csr", *key],
        ["openssl", "x509", "-req", "-in", "node.csr", *signed, "-out", "node.crt"],
    ):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    paths = {f"RAY_TLS_{name}": str(directory / file) for name, file in files.items()}
    return {"RAY_USE_TLS": "1", "RAY_AUTH_MODE": "disabled", **paths}


def test_tls_runs_and_who_has_no_certificate_is_refused(tmp_path):
    variables = certified(tmp_path, ray.util.get_node_ip_address())
    with trained(variables) as address:
        host, _, port = address.rpartition(":")
        for has_one in (False, True):
            context = ssl.create_default_context(cafile=variables["RAY_TLS_CA_CERT"])
            context.set_alpn_protocols(["h2"])
            if has_one:
                own = (variables[f"RAY_TLS_SERVER_{what}"] for what in ("CERT", "KEY"))
                context.load_cert_chain(*own)
            with (
                socket.create_connection((host, int(port)), PATIENCE_SECS) as plain,
                context.wrap_socket(plain, server_hostname=host) as encrypted,
            ):
                assert bool(encrypted.recv(1)) == has_one  # else Ray has closed the connection
