"""How a step scales with the number of devices: the same batch, and a batch that grows with them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from calibjax.commands.plan.chips import Topology, parse_topology
from calibjax.commands.plan.program import Job
from calibjax.eval.report.tables import TextTable

_KINDS = {"strong": "The same batch on more devices", "weak": "As many sequences on each device"}


class Point(NamedTuple):
    """One job of a comparison. kind: strong (the same batch) or weak (a batch that grows with the devices)."""

    kind: str
    topology: Topology
    job: Job


def points(job: Job, topology: Topology) -> list[Point]:
    """The job on smaller topologies of the same chip, all devices along fsdp, and on its own.

    A topology has a quarter of the devices of the next, half along each of its two longest axes; one with a single axis
    a half. None has one device: nothing moves there.
    """
    found = []
    for smaller in _smaller(topology):
        mesh = (1, smaller.devices, 1)
        found.append(Point("strong", smaller, dataclasses.replace(job, mesh=mesh)))
        batch = job.batch * smaller.devices // topology.devices
        sft = dataclasses.replace(job.sft, batch_size=batch)
        found.append(Point("weak", smaller, dataclasses.replace(job, mesh=mesh, batch=batch, sft=sft)))
    return sorted(found, key=lambda point: (point.kind, point.topology.devices))


def _smaller(topology: Topology) -> Iterator[Topology]:
    kind, _, shape = topology.name.partition(":")
    axes = [int(size) for size in shape.split("x")]
    while topology.devices > 1:
        yield topology
        for _ in range(min(2, len(axes))):
            longest = axes.index(max(axes))
            axes[longest] = max(1, axes[longest] // 2)
        topology = parse_topology(f"{kind}:{'x'.join(map(str, axes))}")


def efficiency(plan: dict[str, Any]) -> dict[str, float | None]:
    """Time of the operations at the chip's rate as a fraction of a step's, by the roofline of a plan.

    Returns:
        hidden: where transfers run beside the operations; exposed: where nothing does. None where transfers are not
        known.
    """
    seconds = plan["roofline_seconds"]
    if seconds["interconnect"] is None:
        return {"hidden": None, "exposed": None}
    return {
        "hidden": seconds["compute"] / seconds["bound"],
        "exposed": seconds["compute"] / (seconds["compute"] + seconds["interconnect"]),
    }


def scaling_table(plans: list[dict[str, Any]], size: Any) -> TextTable:
    """Rows by kind and devices; `size` writes bytes."""
    rows, groups = [], []
    for plan in plans:
        seconds, of = plan["roofline_seconds"], plan["efficiency"]
        moved = seconds["interconnect"]
        rows.append(
            [
                f"{plan['devices']}",
                f"{plan['batch']:,}",
                size(plan["bytes_per_device"]["total"]),
                {None: "not known", True: "yes", False: "no"}[plan["fits"]],
                f"{1e3 * seconds['compute']:,.1f}",
                "" if moved is None else f"{1e3 * moved:,.1f}",
                *("" if x is None else f"{x:.0%}" for x in of.values()),
            ]
        )
        groups.append(_KINDS[plan["kind"]])
    columns = ["devices", "batch", "per device", "fits", "compute", "moved", "hidden", "exposed"]
    return TextTable("at least so many ms a step", columns, rows, (6, 7, 5, 4, 1, 2, 3), groups=tuple(groups))
