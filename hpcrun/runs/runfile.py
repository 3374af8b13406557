"""``run.yaml``: exactly what runs. Written once at submission, read by the agent and the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcrun.config import dump_yaml, load_yaml, validate
from hpcrun.recipe import Positive, Recipe, Section
from hpcrun.records import RunDir
from hpcrun.sites.model import Site


class Versions(Section):
    schema_: Literal[1] = Field(1, alias="schema")
    hpcrun: str
    python: str


class RunFile(Section):
    """The resolved recipe and site of one run, with what ran them."""

    run: str
    created: str
    nonce: str = Field(description="in the job's comment and name of the secrets file")
    versions: Versions
    interpreter: str = Field(description="the Python that runs agents and ranks")
    working_dir: str = Field(description="where ranks start")
    nodes: Positive = Field(description="nodes that train; the job holds recipe.resources.spares more")
    ranks_per_node: Positive
    secrets_file: str | None = None
    site: Site
    recipe: Recipe

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


def read_run_file(run: RunDir) -> RunFile:
    """Read ``run.yaml``.

    Raises:
        UserError: missing, or not written by a compatible version.
    """
    return validate(load_yaml(run.run_yaml), RunFile)


def run_file_text(file: RunFile) -> str:
    """The YAML text of ``file``."""
    return dump_yaml(file.model_dump(mode="json", by_alias=True))
