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
            help="cluster profile: a name or a file; with --tokens several, to compare",
            autocompletion=complete_clusters,
        ),
    ] = None,
    set_: Sets = None,
    explain: Annotated[bool, typer.Option("--explain", help="why this one and not its neighbours")] = False,
    what_if: Annotated[
        Strings, typer.Option(metavar="FIELD=VALUE", help="the best recipe with this fixed; may be repeated")
    ] = None,
    gpu: Annotated[
        Strings, typer.Option(metavar="NAME", help="compare GPUs, e.g. 'RTX A5000'; may be repeated")
    ] = None,
    max_micro_batch: Annotated[bool, typer.Option("--max-micro-batch", help="the largest that fits")] = False,
    min_gpus: Annotated[bool, typer.Option("--min-gpus", help="the fewest GPUs that it fits on")] = False,
    tokens: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(metavar="N", help="time and price of so many tokens, e.g. 10e9", min=1),
    ] = None,
    largest: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="ARG=V1,V2,..", help="the largest that fits of an argument of the task"),
    ] = None,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="write one self-contained page"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Which recipe fits, how much memory it needs when, and how fast it is. Nothing is started."""
    from launcher.cli.output import fail, print_json
    from launcher.cli.plan_questions import Asker, tokens_on
    from launcher.cli.prepare import named_cluster, with_gpus
    from launcher.cli.sources import traces_dir
    from launcher.planning.plan import PlanRefusedError
    from launcher.report.content import Page
    from launcher.spec.load import load_job

    if tokens is not None and not isfinite(tokens):
        fail(f"--tokens: {tokens} is no number of tokens")
    if html is not None and not html.absolute().parent.is_dir():
        fail(f"--html: there is no directory {html.absolute().parent}")
    names = cluster or ["local"]
    if len(names) > 1 and tokens is None:
        fail("several clusters are compared by what tokens cost there: add --tokens N, or name one cluster")
    read = load_job(job, set_ or [])
    clusters = [with_gpus(named_cluster(name), read) for name in names]
    askers = [Asker(job, set_ or [], one, traces_dir()) for one in clusters]
    asker = askers[0]
    # What is wrong with a question is said before anything takes time.
    changed, cards = asker.changed(what_if or []), asker.with_cards(gpu or [])
    family = asker.family(largest) if largest else {}
    decider = asker.decider()
    if min_gpus and not decider.layout.gpus_per_node:
        fail("--min-gpus: the job runs without GPUs here")
    if max_micro_batch and decider.room.card is None and decider.room.host is None:
        fail("--max-micro-batch: the profile says neither what a GPU nor what a node has (node.memory)")
    refused, decision = None, None
    try:
        decision = decider.decide(asker.job.plan.vary)
    except PlanRefusedError as error:
        refused = error
    comparisons = []
    if changed:
        comparisons.append(asker.what_if(changed))
    if cards:
        comparisons.append(asker.cards(cards))
    if max_micro_batch and decision is not None:
        comparisons.append(asker.max_micro_batch(decider, decision))
    if min_gpus:
        comparisons.append(asker.min_gpus())
    if family:
        comparisons.append(asker.largest(family))
    if tokens is not None:
        comparisons.append(tokens_on(askers, tokens))
    page = Page(
        job=asker.job,
        cluster=asker.cluster,
        decision=decision,
        tokens_per_sample=decider.about.tokens_per_sample,
        comparisons=tuple(comparisons),
        explain=explain,
        refusal=str(refused or ""),
    )
    if html is not None:
        from launcher.report.plan_html import as_html

        html.write_text(as_html(page), encoding="utf-8")
    if json:
        from launcher.report.data import as_data

        print_json(as_data(page))
    elif decision is not None or comparisons:
        from launcher.cli.output import narrow_console
        from launcher.report.plan import show_page

        show_page(narrow_console(), page)
    if refused is not None:
        raise refused
