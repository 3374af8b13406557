"""From recipe and site to a batch script: limits, quoting, environment, snapshot."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrun.errors import UserError
from hpcrun.launch.environment import job_environment
from hpcrun.launch.executor import visible_gpus
from hpcrun.launch.render import sbatch_options
from hpcrun.launch.request import Options, make_request
from hpcrun.launch.submit import Draft, draft, submit
from hpcrun.recipe import Recipe
from hpcrun.runs.create import create_run, runs_folder
from hpcrun.runs.runfile import read_run_file
from hpcrun.runs.snapshot import find_tree
from hpcrun.sites.model import Site
from hpcrun.slurm.control import SubmissionUnknown

COMMAND: dict[str, Any] = {"command": ["true"]}
TRAINER = Recipe.model_validate({"data": {"path": "/no/such/tokens.bin"}})


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(COMMAND | sections)


def site(**sections: Any) -> Site:
    return Site.model_validate({"name": "s"} | sections)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HPCRUN_RUNS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def drafted(wanted: Recipe, where: Site, **options: Any) -> Draft:
    return draft(wanted, where, Options(**options))


def options_of(item: Draft) -> list[str]:
    return sbatch_options(item.run, item.file, item.request)


def run_exports(item: Draft) -> dict[str, str]:
    """What a shell makes of the script's export lines."""
    exports = item.script.partition("export SLURM_EXPORT_ENV=ALL")[2].partition("trap ''")[0]
    script = f"{exports}\nenv -0"
    path = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], env=path, capture_output=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def test_one_task_per_node_and_a_step_that_outlives_a_node(here: Path) -> None:
    """Field reports: ntasks-ne-gpus-per-node, tasks-uneven."""
    item = drafted(recipe(resources={"nodes": 2, "spares": 1, "gpus_per_node": 4}), site())
    assert {"--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=4", "--no-kill"} <= set(options_of(item))
    assert (item.file.nodes, item.file.ranks_per_node, item.file.world) == (2, 4, 8)
    srun = next(line for line in item.script.split("\n") if line.startswith('"$srun"'))
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"} <= set(shlex.split(srun))


def test_all_sbatch_lines_stand_before_the_first_command(here: Path) -> None:
    """Field report: sbatch-lines-after-command."""
    lines = drafted(recipe(), site()).script.split("\n")
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    assert not [line for line in lines if line.startswith("#SBATCH") and "$" in line]


NASTY = [
    "a,b",
    "two words",
    "$(touch /tmp/x)",
    "`id`",
    "it's",
    '"quoted"',
    "back\\slash",
    "line\nend",
    "*",
    "%j",
]


@pytest.mark.parametrize("value", NASTY)
def test_values_arrive_in_the_job_as_they_were_written(here: Path, value: str) -> None:
    """Field reports: wrap-quoting, vars-in-sbatch-header, export-flags-do-not-add-up."""
    item = drafted(recipe(environment={"WORD": value}), site())
    assert run_exports(item)["WORD"] == value


def test_the_script_is_sound_shell_whatever_the_names(here: Path) -> None:
    where = site(modules=["cuda/12 'x'"], environment={"A": {"value": "1", "reason": "two\nlines; rm -rf"}})
    script = drafted(recipe(environment={"B": "'"}), where, runs=here / "it's $(a) dir").script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "rm -rf" not in "\n".join(line for line in script.split("\n") if not line.startswith("#"))


@pytest.mark.parametrize("name", ["with space", "$(id)", "100%", "a'b", "-dash", "ümlaut", "semi;colon"])
def test_output_goes_to_the_run_directory_wherever_that_is(here: Path, name: str) -> None:
    """Field report: workdir-with-space."""
    item = drafted(recipe(), site(), runs=here / name)
    (output,) = [option for option in options_of(item) if option.startswith("--output=")]
    (value,) = shlex.split(output.removeprefix("--output="))
    assert value == f"{str(item.run.job).replace('%', '%%')}/slurm-%j.out"


@pytest.mark.parametrize("name", ["line\nend", "tab\there", "both'\"quotes"])
def test_a_path_that_no_sbatch_line_can_carry_is_refused(here: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"choose another"):
        options_of(drafted(recipe(), site(), runs=here / name))


def test_environment_has_a_reason_for_each_variable_and_the_recipe_wins() -> None:
    where = site(
        environment={"OMP_NUM_THREADS": {"value": "4", "reason": "measured"}}, rendezvous={"interface": "ib0"}
    )
    exports = {export.name: export for export in job_environment(recipe(environment={"X": "1"}), where)}
    assert exports["OMP_NUM_THREADS"].value == "4"
    assert exports["PYTHONNOUSERSITE"].value == "1"
    assert exports["NCCL_SOCKET_IFNAME"].value == "=ib0"
    assert all(export.reason for export in exports.values())
    both = job_environment(recipe(environment={"OMP_NUM_THREADS": "2"}), where)
    assert [export.value for export in both if export.name == "OMP_NUM_THREADS"] == ["2"]


def test_the_lead_signal_leaves_room_or_is_left_out(here: Path) -> None:
    """Field report: save-longer-than-killwait; a lead of the whole limit would come at once."""
    margins = {"save": 120, "signal": 60}
    long = drafted(recipe(resources={"time": "10m"}), site(margins=margins))
    assert "--signal=USR2@180" in options_of(long)
    short = drafted(recipe(resources={"time": "3m"}), site(margins=margins))
    assert not [option for option in options_of(short) if option.startswith("--signal")]


@pytest.mark.parametrize(
    ("resources", "scheduler", "words"),
    [
        ({"nodes": 9}, {"max_nodes": 8}, "nodes 9 .* allows 8"),
        ({"nodes": 8, "spares": 1}, {"max_nodes": 8}, "spares 1 = 9"),
        ({"time": "2d"}, {"max_time": "1d"}, r"2-00:00:00 \(2 days\).* allows 1 day"),
        ({"time": "UNLIMITED"}, {"max_time": "1d"}, "UNLIMITED"),
        ({"nodes": 2}, {"kind": "local"}, "one machine"),
    ],
)
def test_limits_of_the_site_are_checked_before_anything_queues(
    resources: dict[str, Any], scheduler: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make_request(recipe(resources=resources), Site.model_validate({"name": "s", "scheduler": scheduler}))


def test_the_layout_is_checked_before_anything_queues() -> None:
    """Field report: world-product."""
    wanted = Recipe.model_validate({"parallel": {"tp": 3}, "resources": {"nodes": 1, "gpus_per_node": 4}})
    with pytest.raises(UserError, match=r"4 ranks do not divide by parallel\.tp 3"):
        make_request(wanted, site())


def test_gpus_are_asked_for_in_the_sites_way(here: Path) -> None:
    """Field report: gres-spelling."""
    wanted = recipe(resources={"gpus_per_node": 2})
    typed = site(node={"gpu_type": "a100"}, scheduler={"gpu_request": "gres"})
    assert "--gres=gpu:a100:2" in options_of(drafted(wanted, typed))
    assert "--gpus-per-node=2" in options_of(drafted(wanted, site()))
    none = options_of(drafted(wanted, site(scheduler={"gpu_request": "none"})))
    assert not [option for option in none if option.startswith(("--gpus", "--gres"))]


def test_no_requeue_where_the_site_forbids_it(here: Path) -> None:
    """Field report: hidden-default-requeue."""
    item = drafted(recipe(), site(scheduler={"requeue_allowed": False}))
    assert "--no-requeue" in options_of(item) and "max_requeues=0" in item.script
    assert "max_requeues=0" in drafted(recipe(), site()).script
    assert "max_requeues=20" in drafted(TRAINER, site()).script


def test_a_draft_touches_nothing(here: Path) -> None:
    item = drafted(recipe(), site())
    assert item.script and item.environment
    assert list(here.iterdir()) == []


def test_the_run_directory_is_whole_and_closed_to_others(here: Path) -> None:
    item = drafted(recipe(), site())
    create_run(item.run, item.file, item.tree)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [item.run.path, *item.run.path.iterdir()]
    }
    assert modes[item.run.name] == 0o750 and modes["job"] == 0o700
    assert stat.S_IMODE((item.run.job / "token").stat().st_mode) == 0o600
    assert read_run_file(item.run) == item.file


def test_names_are_never_used_twice(here: Path) -> None:
    """Field report: requeue-same-second-run-dir."""
    names = {drafted(recipe(), site()).run.name for _ in range(50)}
    assert len(names) == 50


def test_secrets_stand_only_in_their_own_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    item = drafted(recipe(secrets=["WANDB_API_KEY"]), site(scheduler={"kind": "local"}))
    monkeypatch.setattr("hpcrun.launch.submit._start", lambda *_: "1")
    submit(item)
    assert item.file.secrets_file
    path = Path(item.file.secrets_file)
    assert json.loads(path.read_text()) == {"WANDB_API_KEY": "s3cr3t"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.is_relative_to(item.run.path)
    assert "s3cr3t" not in item.script
    assert not [
        file for file in item.run.path.rglob("*") if file.is_file() and b"s3cr3t" in file.read_bytes()
    ]


def test_a_secret_that_is_not_set_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(UserError, match="WANDB_API_KEY is not set in your environment"):
        drafted(recipe(secrets=["WANDB_API_KEY"]), site())


def test_a_refused_submission_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report: submit-limit-midway."""

    def refuse(*_: object) -> str:
        raise UserError("sbatch: no")

    monkeypatch.setattr("hpcrun.launch.submit._start", refuse)
    item = drafted(recipe(), site())
    with pytest.raises(UserError, match="sbatch: no"):
        submit(item)
    assert not item.run.path.exists()


def test_a_run_whose_job_may_be_queued_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field report: squeue-timeout-means-finished; a job must not find its run gone."""

    def lose(*_: object) -> str:
        raise SubmissionUnknown("sbatch: Socket timed out")

    monkeypatch.setattr("hpcrun.launch.submit._start", lose)
    item = drafted(recipe(), site())
    with pytest.raises(SubmissionUnknown):
        submit(item)
    assert read_run_file(item.run) == item.file


@pytest.mark.parametrize(
    ("own", "count", "visible"),
    [(None, 2, "0,1"), ("2,3,5", 2, "2,3"), ("GPU-a,GPU-b", 1, "GPU-a"), ("0,1", 0, ""), ("3", 2, "3")],
)
def test_on_this_machine_the_callers_gpus_are_taken(
    monkeypatch: pytest.MonkeyPatch, own: str | None, count: int, visible: str
) -> None:
    """Field report: gpu-bind-subset."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert visible_gpus(count) == visible


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_snapshot_holds_the_tree_as_it_is_now(here: Path) -> None:
    """Field report: config-changed-while-queued."""
    git(here, "init", "-q")
    (here / ".gitignore").write_text("ignored\n")
    for name in ("kept", "changed", "gone", "-dash", "two words", "new\nline"):
        (here / name).write_text("first")
    (here / "sub").mkdir()
    (here / "sub" / "link").symlink_to("../kept")
    git(here, "add", "-A")
    git(here, "commit", "-qm", "x")
    (here / "changed").write_text("second")
    (here / "gone").unlink()
    (here / "untracked").write_text("third")
    (here / "ignored").write_text("no")
    os.chdir(here / "sub")
    item = drafted(recipe(), site(), runs=here.parent / "runs")
    create_run(item.run, item.file, item.tree)
    found = {str(path.relative_to(item.run.code)) for path in item.run.code.rglob("*") if not path.is_dir()}
    assert found == {
        ".gitignore",
        "kept",
        "changed",
        "-dash",
        "two words",
        "new\nline",
        "sub/link",
        "untracked",
    }
    assert (item.run.code / "changed").read_text() == "second"
    assert (item.run.code / "sub" / "link").is_symlink()
    assert item.file.working_dir == str(item.run.code / "sub")
    facts = json.loads((item.run.path / "code.json").read_text())
    assert facts["dirty"] and len(facts["revision"]) == 40


def test_the_snapshot_takes_submodules_and_names_that_are_no_text(here: Path) -> None:
    inner = here.parent / "inner"
    for folder in (inner, here):
        folder.mkdir(exist_ok=True)
        git(folder, "init", "-q")
        (folder / f"of {folder.name}").write_text("x")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "x")
    git(here, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
    (here / "sub" / "new").write_text("x")
    (here / os.fsdecode(b"caf\xe9")).write_text("x")
    item = drafted(recipe(), site(), runs=here.parent / "runs")
    create_run(item.run, item.file, item.tree)
    found = {os.fsencode(path.relative_to(item.run.code)) for path in item.run.code.rglob("*")}
    assert found == {b"of here", b".gitmodules", b"sub", b"sub/of inner", b"sub/new", b"caf\xe9"}


def test_a_tree_that_is_too_large_names_its_largest_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(here, "init", "-q")
    (here / "big.bin").write_bytes(b"x" * 5000)
    monkeypatch.setattr("hpcrun.runs.snapshot.LARGEST", 1000)
    with pytest.raises(UserError, match=r"largest files are big\.bin \(4\.9 KiB\).*--no-snapshot"):
        find_tree(here)


def test_outside_a_tree_ranks_start_where_the_user_stood(here: Path) -> None:
    item = drafted(recipe(), site())
    assert item.tree is None and item.file.working_dir == str(here)


def test_runs_go_where_the_user_or_the_site_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    where = site(filesystem={"runs": "$SCRATCH/runs"})
    assert runs_folder(where) == Path("/scratch/me/runs")
    assert runs_folder(where, Path("x")) == here / "x"
    monkeypatch.setenv("HPCRUN_RUNS", "/elsewhere")
    assert runs_folder(where) == Path("/elsewhere")
    monkeypatch.delenv("HPCRUN_RUNS")
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(UserError, match=r"a variable in .* is not set"):
        runs_folder(where)


def test_size_quota_and_purge_are_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    where = site(filesystem={"purge_days": 14, "quota_bytes": 10}, node={"ranks": 1})
    notes = " ".join(drafted(TRAINER, where).notes)
    assert "checkpoints take" in notes and "deletes files untouched for 14 days" in notes
    assert "the quota of s is 10 B" in notes and "is under your home" in notes


def test_data_is_looked_for_before_anything_queues(here: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path is not set"):
        drafted(Recipe(), site())
    assert "/no/such/tokens.bin is not visible from this machine" in " ".join(drafted(TRAINER, site()).notes)
    assert not [note for note in drafted(recipe(), site()).notes if "data.path" in note]
