"""Commands on this host."""

from __future__ import annotations

from launcher.schedulers.login import LocalLogin


def test_a_script_may_be_longer_than_an_argument_and_reads_its_own_input() -> None:
    """A sweep of thousands of runs names each of them; Linux takes 128 KiB per argument."""
    done = LocalLogin("x=first\n").run(f": {'y' * 200_000}\necho $x\ncat\nexit 3", stdin=b"input")
    assert (done.returncode, done.stdout) == (3, b"first\ninput")
