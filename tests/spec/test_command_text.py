from __future__ import annotations

import pytest

from launcher.spec.command_text import split
from launcher.spec.job import Job


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "python train.py \\\n  --lr 1 \\\n  --note 'a b'\n",
            ["python", "train.py", "--lr", "1", "--note", "a b"],
        ),
        ("python train.py\n  small.yaml\n--lr 1\n", ["python", "train.py", "small.yaml", "--lr", "1"]),
        ("x --sep '|' \"a; b\" \\; 'two\nlines'", ["x", "--sep", "|", "a; b", ";", "two\nlines"]),
        (
            "x <|end|> torch>=2 >=3 a->b ${data.root}",
            ["x", "<|end|>", "torch>=2", ">=3", "a->b", "${data.root}"],
        ),
    ],
)
def test_the_arguments_are_those_of_one_command_in_a_shell(text, arguments):
    assert split(text) == arguments


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python prepare.py\npython train.py\n", "has several lines"),
        ("python prepare.py && python train.py", "&& has no effect"),
        ("python prepare.py; python train.py", "prepare.py; has no effect"),
        ("python train.py | tee log", "| has no effect"),
        ("python train.py > log", "> has no effect"),
        ("python train.py >log 2>&1", ">log has no effect"),
        ("python train.py --name run-$(date +%s)", "run-$(date has no effect"),
        ("python 'train.py", "No closing quotation"),
    ],
)
def test_what_needs_a_shell_is_refused_and_not_passed_to_the_program(text, said):
    with pytest.raises(ValueError, match=r"without a shell|write a list") as raised:
        split(text)
    assert said in str(raised.value)


def test_a_job_reads_its_command_so():
    job = {"name": "x", "batch": {"global": 1}}
    assert Job.model_validate({**job, "command": "python train.py \\\n  --lr 1"}).command == (
        "python",
        "train.py",
        "--lr",
        "1",
    )
    with pytest.raises(ValueError, match="&& has no effect"):
        Job.model_validate({**job, "command": "python prepare.py && python train.py"})
    assert Job.model_validate({**job, "command": ["x", "&&"]}).command == ("x", "&&")
