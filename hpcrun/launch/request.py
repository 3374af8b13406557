"""From a recipe, a site and the command line to what the job asks of Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.layout import make_layout
from hpcrun.recipe import Recipe, Resources
from hpcrun.runs.runfile import RunFile
from hpcrun.sites.model import Site
from hpcrun.units import TimeLimit


@dataclass(frozen=True)
class Options:
    """What the command line may say beside the recipe."""

    runs: Path | None = None
    snapshot: bool = True


@dataclass(frozen=True)
class Request:
    """A job, in Slurm's words."""

    name: str
    nodes: int
    """Nodes that train; the job holds ``spares`` more."""
    spares: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_node: int | None
    memory: int | None
    time: TimeLimit
    partition: str | None
    account: str | None
    qos: str | None

    @property
    def size_words(self) -> str:
        """``2 nodes and 1 spare x 4 ranks``."""
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        spares = f" and {self.spares} spare" if self.spares else ""
        return f"{nodes}{spares} x {self.ranks_per_node} rank{'s' * (self.ranks_per_node != 1)}"


def make_request(recipe: Recipe, site: Site) -> Request:
    """Resolve recipe against site and check the site's limits and the layout.

    Raises:
        UserError: a limit is exceeded, or the layout does not fit the ranks.
    """
    wanted, scheduler = recipe.resources, site.scheduler
    gpus = site.node.gpus if wanted.gpus_per_node is None else wanted.gpus_per_node
    request = Request(
        name=recipe.name,
        nodes=wanted.nodes,
        spares=wanted.spares,
        ranks_per_node=_ranks_per_node(recipe, site, gpus),
        gpus_per_node=gpus,
        cpus_per_node=wanted.cpus_per_node or site.node.cpus,
        memory=wanted.memory,
        time=wanted.time or scheduler.time,
        partition=wanted.partition or scheduler.partition,
        account=wanted.account or scheduler.account,
        qos=wanted.qos or scheduler.qos,
    )
    _check_limits(request, wanted, site)
    if not recipe.command:
        try:
            make_layout(recipe, request.nodes * request.ranks_per_node)
        except ValueError as error:
            raise UserError(str(error)) from error
    return request


def request_of(file: RunFile) -> Request:
    """The request of a run that exists."""
    return make_request(file.recipe, file.site)


def with_failure_rate(recipe: Recipe, site: Site) -> Recipe:
    """The recipe with the site's rate of node failures, where it names none of its own."""
    rate = recipe.recovery.node_failures_per_year or site.expectations.node_failures_per_year
    recovery = recipe.recovery.model_copy(update={"node_failures_per_year": rate or None})
    return recipe.model_copy(update={"recovery": recovery})


def _ranks_per_node(recipe: Recipe, site: Site, gpus: int) -> int:
    return recipe.resources.ranks_per_node or gpus or site.node.ranks or 1


def _check_limits(request: Request, wanted: Resources, site: Site) -> None:
    limits = site.scheduler
    total = request.nodes + request.spares
    if limits.kind == "local" and total > 1:
        raise UserError(f"resources.nodes {total}: the site {site.name} is one machine; set nodes to 1")
    if limits.max_nodes and total > limits.max_nodes:
        raise UserError(
            f"resources.nodes {request.nodes} + spares {request.spares} = {total}: "
            f"the site {site.name} allows {limits.max_nodes}"
        )
    longest = limits.max_time.minutes
    if longest is not None and (request.time.minutes is None or request.time.minutes > longest):
        raise UserError(
            f"resources.time {request.time.slurm()} ({request.time.words()}): the site {site.name} "
            f"allows {limits.max_time.words()}"
        )
    if site.node.gpus and request.gpus_per_node > site.node.gpus:
        raise UserError(
            f"resources.gpus_per_node {request.gpus_per_node}: a node of {site.name} has {site.node.gpus}"
        )
    if site.node.cpus and wanted.cpus_per_node and wanted.cpus_per_node > site.node.cpus:
        raise UserError(
            f"resources.cpus_per_node {wanted.cpus_per_node}: a node of {site.name} has {site.node.cpus}"
        )
