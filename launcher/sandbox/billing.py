"""GET /v2/billing/pods: the billed amounts per period."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import Ledger, seconds

_SIZES = ("hour", "day", "week", "month", "year")


def pods(ledger: Ledger, query: dict[str, str], now: float) -> dict[str, Any]:
    """Return a `ListPodBillingResponse`."""
    size = query.get("bucketSize", "day")
    if size not in _SIZES:
        raise ProblemError(422, f"bucketSize: one of {', '.join(_SIZES)}")
    if "lastN" in query and ("startTime" in query or "endTime" in query):
        raise ProblemError(400, "lastN excludes startTime and endTime")
    try:
        first, last = _window(query, size, now)
    except ValueError as error:
        raise ProblemError(422, str(error)) from None
    pod_id = query.get("podId")
    records: list[dict[str, Any]] = []
    start = first
    while start < last:
        end = _next(start, size)
        amounts: dict[str, dict[str, float]] = {}
        for charge in ledger.charges.values():
            usd = charge.usd(now, start.timestamp(), end.timestamp())
            if usd and pod_id in (None, charge.pod):
                kinds = amounts.setdefault(charge.pod, {"gpu": 0.0, "cpu": 0.0})
                kinds[charge.kind] += usd
        for pod, kinds in sorted(amounts.items()):
            records.append({"podId": pod, **_range(start, end), **_amounts(kinds["gpu"], kinds["cpu"])})
        start = end
    totals = _amounts(
        sum(record["gpuAmount"] for record in records), sum(record["cpuAmount"] for record in records)
    )
    return {
        "records": records,
        "metadata": {
            "query": {**_range(first, last), "bucketSize": size, "podId": pod_id},
            "recordCount": len(records),
            "uniquePodCount": len({record["podId"] for record in records}),
            "totals": totals,
        },
    }


def _window(query: dict[str, str], size: str, now: float) -> tuple[datetime, datetime]:
    today = _time(now)
    if "lastN" in query:
        start = end = _floor(today, size)
        for _ in range(int(query["lastN"]) - 1):
            start = _floor(start - timedelta(hours=1), size)
        return start, _next(end, size)
    start = _time(seconds(query["startTime"])) if "startTime" in query else today - timedelta(days=30)
    end = _time(seconds(query["endTime"])) if "endTime" in query else today
    floor = _floor(end, size)
    return _floor(start, size), floor if floor == end else _next(floor, size)


def _time(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, timezone.utc)


def _floor(moment: datetime, size: str) -> datetime:
    hour = moment.replace(minute=0, second=0, microsecond=0)
    if size == "hour":
        return hour
    day = hour.replace(hour=0)
    if size == "day":
        return day
    if size == "week":
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if size == "month" else day.replace(month=1, day=1)


def _next(start: datetime, size: str) -> datetime:
    longest = {"hour": 1, "day": 24, "week": 24 * 7, "month": 24 * 31, "year": 24 * 366}
    return _floor(start + timedelta(hours=longest[size]), size)


def _range(start: datetime, end: datetime) -> dict[str, str]:
    return {
        "startTime": start.isoformat().replace("+00:00", "Z"),
        "endTime": end.isoformat().replace("+00:00", "Z"),
    }


def _amounts(gpu: float, cpu: float) -> dict[str, float]:
    return {"totalAmount": gpu + cpu, "gpuAmount": gpu, "cpuAmount": cpu, "diskAmount": 0.0}
