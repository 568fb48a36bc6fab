"""`launcher plan`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, JobFile, Sets, complete_clusters

Strings = Optional[list[str]]  # noqa: UP045


def plan(
    job: JobFile,
    cluster: Annotated[
        Strings,
        typer.Option(
            "--cluster",
            "-c",
            help="cluster profile: a name or a file; repeat it with --tokens to compare",
            autocompletion=complete_clusters,
        ),
    ] = None,
    set_: Sets = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="show why this recipe was chosen, and each peak of memory")
    ] = False,
    what_if: Annotated[
        Strings,
        typer.Option(metavar="FIELD=VALUE", help="show the best recipe with this value; may be repeated"),
    ] = None,
    gpu: Annotated[
        Strings,
        typer.Option(metavar="NAME", help="plan for this GPU as well, e.g. 'RTX A5000'; may be repeated"),
    ] = None,
    max_micro_batch: Annotated[
        bool, typer.Option("--max-micro-batch", help="find the largest micro-batch that fits")
    ] = False,
    min_gpus: Annotated[
        bool, typer.Option("--min-gpus", help="find the fewest GPUs that the job fits on")
    ] = False,
    tokens: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="N", help="show time and price of training on N tokens, e.g. 10e9", min=1),
    ] = None,
    largest: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="ARG=V1,V2,..", help="find the largest value of a task argument that fits"),
    ] = None,
    zero: Annotated[
        bool, typer.Option("--zero", help="compare memory without sharding and with each stage of ZeRO")
    ] = False,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="write one self-contained HTML page"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show which recipe fits, how much memory it needs, and how fast it is. Start nothing."""
    from launcher.api.plans import Questions, answer
    from launcher.cli.output import fail, page_file, print_json
    from launcher.spec.progress import working

    if tokens is not None and not isfinite(tokens):
        fail(f"--tokens: {tokens} is not a number of tokens")
    page = page_file("--html", html) if html is not None else None
    rungs = explain or json or html is not None  # these show the figures of the ladder
    questions = Questions(
        explain, what_if or (), gpu or (), max_micro_batch, min_gpus, tokens, largest, zero, rungs
    )
    with working("comparing recipes"):
        answered = answer(job, cluster or ["local"], set_ or [], questions)
    if page is not None:
        from launcher.report.plan_html import as_html
        from launcher.rundir.files import replace_text

        replace_text(page, as_html(answered.page))
    if json:
        from launcher.report.data import as_data

        print_json(as_data(answered.page))
    elif answered.page.decision is not None or answered.page.comparisons or answered.page.zero is not None:
        from launcher.cli.output import console
        from launcher.report.plan import show_page

        show_page(console(80), answered.page)
    if answered.refused is not None:
        raise answered.refused
