"""Inside quotes a template has the names of events as text: they are those of spec/events.py."""

from __future__ import annotations

import re

from launcher.render import shipped
from launcher.spec.events import KINDS
from launcher.spec.failures import EXIT_CODES


def test_what_templates_look_for_in_events_are_names_of_events() -> None:
    found = set[str]()
    for name in shipped.template_names():
        text = (shipped.templates_dir() / name).read_text()
        for names in re.findall(r'"event": "\(?([a-z|-]+)\)?"', text):
            found |= set(names.split("|"))
    assert found and found <= KINDS.keys()


def test_a_setup_that_fails_has_the_exit_code_of_its_class() -> None:
    text = (shipped.templates_dir() / "slurm/job.sbatch.j2").read_text()
    assert re.findall(r"fail (user-error) (\d+)", text) == [("user-error", str(EXIT_CODES["user-error"]))]
