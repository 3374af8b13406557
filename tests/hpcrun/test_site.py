"""Site files: found, strict, and complete by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.datafiles import data_folder
from hpcrun.errors import UserError
from hpcrun.sites.model import Site
from hpcrun.sites.registry import find_site, known_sites, load_site


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HPCRUN_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "hpcrun" / "sites").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    "path", sorted(data_folder("site_configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_shipped_sites_are_valid_and_carry_their_file_name(path: Path) -> None:
    assert load_site(path).name == path.stem


def test_a_site_needs_only_its_name() -> None:
    site = Site(name="new")
    assert site.scheduler.requeue_allowed and not site.filesystem.hdf5_locking
    assert site.expectations.gpu_hour_price is None


def test_a_users_own_file_hides_a_shipped_one(own_home: Path) -> None:
    own = own_home / "config" / "hpcrun" / "sites" / "local.yaml"
    own.write_text("name: local\ndescription: mine\nscheduler: {kind: local}\n")
    assert known_sites()["local"] == own
    assert find_site("local")[0].description == "mine"


def test_the_choice_is_explained(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_site("local")[1] == "by --site"
    monkeypatch.setenv("HPCRUN_SITE", "testcluster")
    site, why = find_site()
    assert (site.name, why) == ("testcluster", "by $HPCRUN_SITE")


def test_without_sbatch_it_is_this_machine(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own_home))
    assert find_site() == (find_site("local")[0], "no sbatch on PATH")
    (own_home / "sbatch").write_text("#!/bin/sh\n")
    (own_home / "sbatch").chmod(0o755)
    assert find_site()[0].name == "generic-slurm"


def test_a_path_is_a_site_file(own_home: Path) -> None:
    path = own_home / "mine.yaml"
    path.write_text("name: mine\n")
    assert find_site(str(path))[0].name == "mine"


def test_mistakes_name_file_line_and_key(own_home: Path) -> None:
    """Field report: unknown-key."""
    path = own_home / "bad.yaml"
    path.write_text("name: bad\nscheduler:\n  partitoin: gpu\n")
    with pytest.raises(UserError, match=r"bad\.yaml:3: unknown key 'scheduler\.partitoin'; did you mean"):
        load_site(path)
    with pytest.raises(UserError, match=r"no site 'nope' \(by --site\); known sites: generic-slurm, local"):
        find_site("nope")
