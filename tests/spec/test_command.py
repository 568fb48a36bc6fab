from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.spec.command import PLACEHOLDERS, check_command, fill

VALUES = dict.fromkeys(PLACEHOLDERS, "7")


def test_known_placeholders_are_filled_wherever_they_stand():
    assert fill("--bs={micro_batch_size}x{grad_accum}", VALUES) == "--bs=7x7"


@pytest.mark.parametrize(
    "text", ['{"a":{"b":1}}', "${HOME}", "${steps}", "{lr}", "{}", "{{", "a}}b", "{{lr}}"]
)
def test_everything_else_stays_byte_for_byte(text):
    assert fill(text, VALUES) == text


def test_doubled_braces_stand_for_the_literal_placeholder():
    assert fill("{{run_dir}}", VALUES) == "{run_dir}"


@given(st.text())
def test_text_without_a_placeholder_is_never_changed(text):
    if not any(f"{{{name}}}" in text for name in PLACEHOLDERS):
        assert fill(text, VALUES) == text


def test_a_near_miss_is_a_spelling_mistake():
    with pytest.raises(ValueError, match=r"did you mean \{micro_batch_size\}\?"):
        check_command(("python", "x.py", "{micro_batchsize}"))


def test_a_launcher_started_as_a_module_is_refused_as_well():
    with pytest.raises(ValueError, match=r"torch\.distributed\.run, which starts the ranks itself"):
        check_command(("python3", "-m", "torch.distributed.run", "train.py"))
    check_command(("python", "-m", "my.training"))


@pytest.mark.parametrize("program", ["torchrun", "/opt/bin/accelerate", "deepspeed", "mpirun"])
def test_a_command_that_starts_the_ranks_itself_is_refused(program):
    with pytest.raises(ValueError, match="starts the ranks itself"):
        check_command((program, "train.py"))
