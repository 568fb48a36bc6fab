"""launcher-pod, the command of the RunPod image: a real sshd, in namespaces of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.images.examples import images, rendered

RUNPOD = next(image for image in images() if image.target == "runpod")
# The network of this machine is not touched, and what the script starts ends with the namespace.
ALONE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
LOGIN = r"""
set -eu
ip link set lo up
for folder in /run /root /etc/ssh; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
: >/etc/ssh/sshd_config
ls /etc/ssh >"$1/before"
PATH=/opt/venv/bin:$PATH PUBLIC_KEY=$(cat "$1/key.pub") HOME=/root bash "$1/pod.sh" --sshd
login() {
  ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes -o LogLevel=ERROR \
    "$@"
}
for try in 1 2 3 4 5 6 7 8 9 10; do
  if login -i "$1/key" root@127.0.0.1 'echo "$PATH"' >"$1/path"; then break; fi
  sleep 0.2
done
login root@127.0.0.1 true 2>"$1/refused" || true
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pod.sh"
    path.write_text(rendered(RUNPOD)["runpod-cuda13/pod.sh"].text)
    return path


def test_a_pod_lets_in_who_has_the_key_and_nobody_else(script: Path, tmp_path: Path) -> None:
    for command in ("sshd", "ssh", "ip", "unshare"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{command} is not installed")
    if os.getuid() != 0 or subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0:
        pytest.skip("namespaces need root")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    done = subprocess.run([*ALONE, "bash", "-c", LOGIN, "bash", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sshd is listening" in done.stderr
    assert (tmp_path / "path").read_text().startswith("/opt/venv/bin:")
    assert "Permission denied" in (tmp_path / "refused").read_text()
    assert (tmp_path / "before").read_text() == "sshd_config\n", "the host keys were made by the script"


def test_without_a_key_no_sshd_is_started(script: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", script, "--sshd"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == "launcher: no PUBLIC_KEY in the environment, so no sshd\n"
