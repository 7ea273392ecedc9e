"""docker/slurm/train.sbatch with stand-ins for srun and Apptainer; test_slurm.py runs it on a real SLURM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/slurm/train.sbatch"

SRUN = """\
#!/bin/bash
# Write the options and the variables; run the command as the only task.
printf '%s\\n' "$@" > "$SEEN/options"
env > "$SEEN/variables"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""

SCONTROL = """\
#!/bin/bash
case $1 in
  requeue) echo "$@" > "$SEEN/requeued" ;;
  *) echo "JobId=7 JobName=train Command=${CHECKOUT:-/nowhere}/docker/slurm/train.sbatch --config=x WorkDir=/" ;;
esac
"""

PYTHON = """\
#!/bin/bash
# An interpreter that has the package; it notes what it is to train, and what it sees of RUN_DIR and of $LOOK.
[ "$1 $2" = "-P -c" ] && exit 0
printf '%s\\n' "$@" > run-of-python
while [ "$1" != --run_dir ]; do shift; done
ls -d "$2" $LOOK > seen-by-python 2>&1
date > "$2/written"
"""

APPTAINER = """\
#!/bin/bash
# Stand-in for Apptainer: a root that holds the system's folders and what --bind names, and nothing else.
[ "$1 $2" = "exec --nv" ] || exit 64
shift 2
binds=()
while [ "$1" = --bind ]; do binds+=("$2"); shift 2; done
shift # the image
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
[ "$(id -u)" = 0 ] || map=--map-root-user
exec unshare $map --mount bash -c '
  root=$(mktemp -d) && mount -t tmpfs none "$root" || exit 65
  while [ "$1" != -- ]; do
    IFS=: read -r source target _ <<<"$1"
    mkdir -p "$root${target:=$source}" && mount --rbind "$source" "$root$target" || exit 65
    shift
  done
  shift
  exec chroot "$root" bash -c "cd \\"\\$0\\" && exec \\"\\$@\\"" "$PWD" "$@"
' container /usr /bin /lib /lib64 /dev "${binds[@]}" -- "$@"
"""


class Submission:
    """Folder to submit from, with stand-ins for the programs of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.work, self.programs, self.seen = folder / "work", folder / "programs", folder / "seen"
        for path in (self.work, self.programs, self.seen):
            path.mkdir(parents=True)
        self.variables = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "SEEN": str(self.seen),
            "TMPDIR": str(folder),
            "HOME": str(folder / "home"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "1",
        }
        self.program("srun", SRUN)
        self.program("scontrol", SCONTROL)
        self.program("python", PYTHON)

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        """Write an executable file."""
        path = (folder or self.programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script as SLURM does."""
        command = ["/bin/bash", str(SCRIPT), *arguments]
        every = {name: value for name, value in {**self.variables, **variables}.items() if value != "unset"}
        return subprocess.run(command, cwd=self.work, env=every, capture_output=True, text=True, timeout=60)

    def train(self, *arguments: str, **variables: str) -> list[str]:
        """Run the script, check that it succeeds, and return the arguments of the interpreter."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return (self.work / "run-of-python").read_text().splitlines()

    def reject(self, *arguments: str, **variables: str) -> str:
        """Run the script, check that it starts nothing, and return the only line that it prints."""
        done = self.run(*arguments, **variables)
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        assert (done.returncode, len(lines)) == (2, 1), lines
        assert not (self.seen / "options").exists()
        return lines[0]

    @property
    def options(self) -> list[str]:
        """Return the options that srun received."""
        return [word for word in (self.seen / "options").read_text().splitlines() if word.startswith("--")]

    @property
    def exported(self) -> dict[str, str]:
        """Return the environment variables that srun received."""
        return dict(line.partition("=")[::2] for line in (self.seen / "variables").read_text().splitlines())


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(tmp_path)


def test_arguments_reach_the_run(submission: Submission) -> None:
    words = submission.train("--config", "a b.yaml", "--model.shape.depth=3")
    expected = [
        "-P",
        "-m",
        "mhla_tasks",
        "fit",
        "--config",
        "a b.yaml",
        "--model.shape.depth=3",
        "--config",
        "mhla://trainer/slurm.yaml",
    ]
    assert words == [*expected, "--run_dir", "runs/train-7", "--trainer.num_nodes", "1", "--trainer.devices", "1"]


@pytest.mark.parametrize(
    ("variables", "nodes", "devices"),
    [
        pytest.param({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}, 1, 2, id="ntasks"),
        pytest.param(
            {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2"}, 2, 1, id="ntasks, two nodes"
        ),
        pytest.param(
            {"SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "3", "SLURM_TASKS_PER_NODE": "3(x2)", "SLURM_NNODES": "2"},
            2,
            3,
            id="per node",
        ),
        pytest.param({"SLURM_TASKS_PER_NODE": "64(x2)", "SLURM_NNODES": "2"}, 2, 1, id="exclusive nodes of 64 CPUs"),
        pytest.param({"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4"}, 1, 4, id="no total"),
    ],
)
def test_devices_are_the_tasks_of_a_node(
    submission: Submission, variables: dict[str, str], nodes: int, devices: int
) -> None:
    words = submission.train(**variables)
    assert words[-4:] == ["--trainer.num_nodes", str(nodes), "--trainer.devices", str(devices)]
    assert {f"--nodes={nodes}", f"--ntasks={nodes * devices}", f"--ntasks-per-node={devices}"} <= {*submission.options}


@pytest.mark.parametrize("layout", ["2,1", "4,2", "2(x3),1"])
def test_uneven_tasks_are_one_clear_line(submission: Submission, layout: str) -> None:
    said = submission.reject(SLURM_NTASKS="3", SLURM_TASKS_PER_NODE=layout, SLURM_NNODES="2")
    assert layout in said
    assert "--ntasks-per-node" in said


@pytest.mark.parametrize(
    "binding",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=1,gres/gpu=1"},
        {"SLURM_NTASKS_PER_GPU": "1"},
        {"SLURM_GPU_BIND": "single:1"},
        {"SLURM_GPUS": "2"},
    ],
    ids=lambda binding: next(iter(binding)),
)
def test_a_step_asks_for_gpus_by_node(submission: Submission, binding: dict[str, str]) -> None:
    submission.train(**binding, SLURM_GPUS_ON_NODE="2", SLURM_NTASKS="2", SLURM_TASKS_PER_NODE="2")
    assert "--gpus-per-node=2" in submission.options
    assert not {*binding} & {*submission.exported}


def test_tasks_and_gpus_that_differ_are_mentioned(submission: Submission) -> None:
    assert "--ntasks-per-node=8 fits" in submission.run(SLURM_GPUS_ON_NODE="8").stdout
    assert "GPU" not in submission.run(SLURM_GPUS_ON_NODE="1").stdout


def test_tasks_keep_their_cpus(submission: Submission) -> None:
    submission.train(SLURM_CPUS_PER_TASK="12")
    assert "--cpus-per-task=12" in submission.options


def test_a_job_without_variables_finds_its_interpreter(submission: Submission) -> None:
    """The environment is that of SBATCH_EXPORT=NONE: PATH knows another Python, the package is in .venv of the script's checkout."""
    (submission.programs / "python").unlink()
    submission.program("python3", "#!/bin/sh\nexit 1\n")
    submission.program("python", PYTHON, submission.work.parent / "my checkout/.venv/bin")
    submission.train(CHECKOUT=str(submission.work.parent / "my checkout"))
    assert "--export=ALL" in submission.options
    assert "MASTER_PORT" in submission.exported


def test_a_job_without_a_path_uses_that_of_bash(submission: Submission) -> None:
    (submission.work / "setup.sh").write_text(f"PATH={submission.programs}:$PATH\n")
    submission.train(PATH="unset", SETUP="setup.sh")
    assert submission.exported["PATH"].startswith(f"{submission.programs}:/")


def test_nothing_in_the_working_folder_is_run(submission: Submission) -> None:
    """Not its .venv, not a setup.sh, not modules named like the package's imports."""
    (submission.programs / "python").unlink()
    submission.program("python", PYTHON, submission.work / ".venv/bin")
    for name in ("setup.sh", "docker/slurm/setup.sh"):
        submission.program(Path(name).name, "touch ran\n", (submission.work / name).parent)
    for name in ("mhla_tasks", "importlib", "lightning"):
        (submission.work / f"{name}.py").write_text("open('ran', 'w')\n")
    path = f"{submission.programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = submission.run("--help", PATH=path, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert "ended with status 0" in done.stdout, done.stdout + done.stderr
    assert not (submission.work / "ran").exists()
    assert not (submission.work / "run-of-python").exists()


def test_an_interpreter_without_the_package_is_one_clear_line(submission: Submission) -> None:
    (submission.programs / "python").unlink()
    submission.program("python3", "#!/bin/sh\nexit 1\n")
    assert "set PYTHON" in submission.reject(PATH=f"{submission.programs}:/bin")
    assert "PYTHON=/nowhere/python" in submission.reject(PYTHON="/nowhere/python")


def test_a_setup_file_is_sourced_first(submission: Submission) -> None:
    """Its PATH, variables and options count, and it leaves the arguments of the run alone."""
    lines = [
        "set -eu -o pipefail",
        "set -- other",
        f"export PATH={submission.programs}:$PATH",
        "RUN_DIR=runs/mine",
        "export CUDA_HOME=/cuda",
    ]
    default = Path(submission.variables["HOME"], ".config/lightning-mhla/setup.sh")
    default.parent.mkdir(parents=True)
    default.write_text("\n".join(lines))
    submission.program("python", PYTHON.replace("date >", "exit 3 #"))
    done = submission.run("--config=a.yaml", PATH="/usr/bin:/bin")
    assert "training ended with status 3" in done.stdout, "the options of the file ended the script before"
    words = (submission.work / "run-of-python").read_text().splitlines()
    assert words[4] == "--config=a.yaml"
    assert words[words.index("--run_dir") + 1] == "runs/mine"
    assert submission.exported["CUDA_HOME"] == "/cuda"


def test_a_setup_file_may_use_what_is_not_set(submission: Submission) -> None:
    (submission.work / "env.sh").write_text('[ -z "$LMOD_CMD" ]\n')
    submission.train(SETUP="env.sh")


def test_a_setup_file_that_fails_or_is_missing_is_one_clear_line(submission: Submission) -> None:
    assert "SETUP=other.sh cannot be read" in submission.reject(SETUP="other.sh")
    (submission.work / "env.sh").write_text("return 4\n")
    assert "SETUP=env.sh ended with status 4" in submission.reject(SETUP="env.sh")


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_before_training_queues_the_job_again(submission: Submission, name: str) -> None:
    (submission.work / "env.sh").write_text(f"kill -{name} $$\n")
    assert submission.run(SETUP="env.sh").returncode == 0
    assert (submission.seen / "requeued").read_text() == "requeue 7\n"
    assert not (submission.seen / "options").exists()


def test_other_surroundings_that_cannot_work_are_one_clear_line(submission: Submission) -> None:
    assert "submit it with sbatch" in submission.reject(SLURM_JOB_ID="unset")
    (submission.work / "file").touch()
    assert "RUN_DIR=file/run" in submission.run(RUN_DIR="file/run").stdout
    (submission.programs / "srun").unlink()
    if shutil.which("srun", path="/usr/bin:/bin") is None:
        assert "there is no srun" in submission.reject()


def binds(submission: Submission) -> list[str]:
    """Return the folders that a container was started with."""
    words = (submission.seen / "container").read_text().splitlines()
    return [word for option, word in pairwise(words) if option == "--bind"]


@pytest.mark.parametrize("engine", ["apptainer", "singularity"])
def test_a_container_is_given_what_the_job_uses(submission: Submission, tmp_path: Path, engine: str) -> None:
    submission.program(engine, f'#!/bin/bash\nprintf "%s\\n" "$@" > {submission.seen}/container\n')
    for name in ("elsewhere", "data", "fast disk"):
        (tmp_path / name).mkdir()
    (submission.work / "image.sif").touch()
    run_dir, more = tmp_path / "elsewhere/run", f"{tmp_path}/data:/data:ro,/usr/share"
    done = submission.run(
        "--x=1", CONTAINER="image.sif", RUN_DIR=str(run_dir), TMPDIR=f"{tmp_path}/fast disk", BINDS=more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert binds(submission) == [
        str(submission.work),
        str(run_dir),
        f"{tmp_path}/fast disk",
        f"{tmp_path}/data:/data:ro",
        "/usr/share",
    ]
    words = (submission.seen / "container").read_text().splitlines()
    assert words[words.index("image.sif") + 1 :][:6] == ["python", "-P", "-m", "mhla_tasks", "fit", "--x=1"]
    assert submission.exported["TRITON_CACHE_DIR"].startswith(f"{tmp_path}/fast disk/")


def test_a_container_that_cannot_start_is_one_clear_line(submission: Submission, tmp_path: Path) -> None:
    nothing = {"PATH": f"{submission.programs}:{tmp_path}/core"}
    (tmp_path / "core").mkdir()
    for name in ("mkdir", "realpath", "uname"):
        (tmp_path / "core" / name).symlink_to(str(shutil.which(name)))
    assert "needs apptainer" in submission.reject(CONTAINER="image.sif", **nothing)
    submission.program("apptainer", "#!/bin/sh\n")
    assert "CONTAINER=image.sif does not exist" in submission.reject(CONTAINER="image.sif")
    (submission.work / "image.sif").touch()
    assert "BINDS names /nowhere/data," in submission.reject(CONTAINER="image.sif", BINDS="/usr,/nowhere/data:/data")
    assert "BINDS names image.sif," in submission.reject(CONTAINER="image.sif", BINDS="image.sif")
    said = submission.reject(CONTAINER="image.sif", RUN_DIR=str(tmp_path / "a,b"))
    assert f"{tmp_path}/a,b: commas" in said


@pytest.mark.parametrize(("status", "requeued"), [("255", False), ("137", True), ("1", False)])
def test_a_container_that_does_not_start_is_not_tried_again(
    submission: Submission, status: str, requeued: bool
) -> None:
    """Apptainer itself ends with 255; a program killed inside with 128 and the signal."""
    submission.program("apptainer", f"#!/bin/bash\nexit {status}\n")
    (submission.work / "image.sif").touch()
    done = submission.run(CONTAINER="image.sif")
    assert done.returncode == int(status)
    assert (submission.seen / "requeued").exists() == requeued
    assert ("the container could not be started" in done.stdout) == (status == "255")


@pytest.fixture
def contained(submission: Submission) -> Submission:
    """Run jobs of this submission in a separate root with the interpreter of the working folder."""
    submission.program("apptainer", APPTAINER)
    submission.program("python", PYTHON, submission.work)
    (submission.work / "image.sif").touch()
    submission.variables |= {"CONTAINER": "image.sif", "PYTHON": "./python"}
    done = submission.run()
    if "unshare: " in done.stderr or "mount: " in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr}")
    return submission


def test_an_absolute_run_folder_is_written_from_inside(contained: Submission, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "hidden").mkdir()
    run_dir = tmp_path / "elsewhere/run"
    look = f"{tmp_path}/data {tmp_path}/hidden"
    contained.train(RUN_DIR=str(run_dir), TMPDIR="/usr/share", BINDS=f"{tmp_path}/data", LOOK=look)
    assert (run_dir / "written").exists()
    saw = (contained.work / "seen-by-python").read_text()
    assert f"\n{tmp_path}/data" in f"\n{saw}"
    assert f"cannot access '{tmp_path}/hidden'" in saw, "the stand-in shows everything, so this test shows nothing"


@pytest.mark.parametrize("linked", ["runs", "run folder", "working folder", "temporary folder"])
def test_links_on_the_way_are_followed(contained: Submission, tmp_path: Path, linked: str) -> None:
    (tmp_path / "scratch").mkdir()
    variables = {"TMPDIR": "/usr/share"}
    written = contained.work / "runs/train-7/written"
    if linked == "runs":
        shutil.rmtree(contained.work / "runs")
        (contained.work / "runs").symlink_to(tmp_path / "scratch")
    elif linked == "run folder":
        (tmp_path / "home").symlink_to(tmp_path / "scratch")
        variables["RUN_DIR"] = str(tmp_path / "home/run")
        written = tmp_path / "scratch/run/written"
    elif linked == "working folder":
        contained.work = contained.work.rename(tmp_path / "scratch/work")
        (tmp_path / "work").symlink_to(contained.work)
        variables["PWD"] = str(tmp_path / "work")
        written = contained.work / "runs/train-7/written"
    else:
        (tmp_path / "fast").symlink_to(tmp_path / "scratch")
        variables["TMPDIR"] = str(tmp_path / "fast")
        contained.train(**variables)
        assert contained.exported["TRITON_CACHE_DIR"] == f"{tmp_path}/scratch/triton-7"
        assert contained.exported["TMPDIR"] == f"{tmp_path}/scratch"
    if written.exists():
        written.unlink()
    contained.train(**variables)
    assert written.exists()


def test_files_of_another_place_can_be_mounted_under_another_name(contained: Submission, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    contained.train(TMPDIR="/usr/share", BINDS=f"{tmp_path}/archive:/data", LOOK="/data")
    assert (contained.work / "seen-by-python").read_text().startswith("/data\n")
    assert os.path.lexists(contained.work / "runs/train-7/written")
