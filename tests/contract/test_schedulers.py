"""The contract of every scheduler, with recorded environments: what a process learns from its own."""

from __future__ import annotations

import pytest
from scheduler_environments import BATCH_SCRIPT, RUNS, Recorded, kubernetes, mpich, open_mpi, slurm, torchrun

from hoop.errors import InvalidArgument, NotFound, UserError
from hoop.schedulers.base import FIRST_PORT, PORTS, Placement
from hoop.schedulers.catalog import NAMES, SCHEDULERS, detect, find_placement
from hoop.schedulers.slurm import first_host, tasks_per_node
from hoop.topology import Address

MEET = Address("n01", 4444)


def placements(run: Recorded) -> list[Placement]:
    meet = MEET if run.needs_meet else None
    found = [find_placement(environ, meet=meet) for environ in run.environments]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_processes_of_a_run_agree(run: Recorded) -> None:
    found = placements(run)
    size = len(run.environments)
    assert [one.rank for one in found] == list(range(size))
    assert {one.world_size for one in found} == {size}
    assert {one.scheduler for one in found} == {run.scheduler}
    assert len({one.meeting_point for one in found}) == 1, "all ranks must meet at the same place"
    for host in set(run.hosts):
        here = [one for one, where in zip(found, run.hosts, strict=True) if where == host]
        assert [one.local_rank for one in here] == list(range(len(here)))
        assert {one.local_world_size for one in here} == {len(here)}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_meeting_point_is_loopback_unless_the_run_spans_hosts(run: Recorded) -> None:
    for one in placements(run):
        assert one.meeting_point is not None
        assert one.meeting_point.host == (run.host or MEET.host)
        assert one.meeting_point.is_loopback != one.spans_hosts
        assert 0 < one.meeting_point.port < 65536


@pytest.mark.parametrize("run", [run for run in RUNS if not run.needs_meet], ids=str)
def test_naming_the_scheduler_finds_what_detection_finds(run: Recorded) -> None:
    for environ in run.environments:
        found = detect(environ)
        assert found is not None
        assert found.name == run.scheduler
        assert find_placement(environ, on=run.scheduler) == find_placement(environ)
        assert find_placement(environ, on="local") is None


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_missing_variable_never_gives_another_rank(run: Recorded) -> None:
    """Without one of its variables, a process finds the same place, or none, or an error that names a variable."""
    scheduler = next(one for one in SCHEDULERS if one.name == run.scheduler)
    for environ in run.environments:
        whole = scheduler.placement(environ)
        for name in environ:
            rest = {key: value for key, value in environ.items() if key != name}
            found, problem = whole, ""
            try:
                found = scheduler.placement(rest)
            except UserError as error:
                problem = str(error)
            assert not problem or name in problem
            assert (found.rank, found.world_size) == (whole.rank, whole.world_size), name


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_rank_that_is_no_number_is_refused_by_name(run: Recorded) -> None:
    scheduler = next(one for one in SCHEDULERS if one.name == run.scheduler)
    ranks = {"slurm": "SLURM_PROCID", "mpi": "OMPI_COMM_WORLD_RANK PMI_RANK", "torchrun": "RANK"}
    wrong = dict.fromkeys(ranks.get(run.scheduler, "HOOP_WORLD_SIZE").split(), "two")
    with pytest.raises(InvalidArgument, match=r"'two' is not a whole number"):
        scheduler.placement(run.environments[0] | wrong)


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="a terminal"),
        pytest.param(BATCH_SCRIPT, id="the script of sbatch"),
        pytest.param(kubernetes(1) | {"HOOP_WORLD_SIZE": ""}, id="independent pods of an Indexed Job"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, id="no torchrun"),
        pytest.param({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, id="PMIx without a size"),
        pytest.param(slurm(0, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1"), id="a task alone"),
        pytest.param(torchrun(0, WORLD_SIZE="1", LOCAL_WORLD_SIZE="1"), id="torchrun with one process"),
    ],
)
def test_such_a_process_is_a_run_of_its_own(environ: dict[str, str]) -> None:
    assert find_placement(environ) is None


def test_a_single_process_is_a_rank_if_its_scheduler_is_named() -> None:
    found = find_placement(slurm(0, SLURM_STEP_NUM_TASKS="1", SLURM_STEP_TASKS_PER_NODE="1"), on="slurm")
    assert found is not None
    assert (found.rank, found.world_size, found.spans_hosts) == (0, 1, False)


def test_torchs_variables_suffice_where_torchrun_is_named() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "master", "MASTER_PORT": "23456"}
    found = find_placement(environ, on="torchrun")
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 0, 1)
    assert found.meeting_point is not None
    assert found.meeting_point.host == "master"


@pytest.mark.parametrize("environ", [slurm(1), open_mpi(1), mpich(1), torchrun(1)], ids=["slurm", "ompi", "mpich", "t"])
def test_the_port_follows_from_the_job_in_the_stated_range(environ: dict[str, str]) -> None:
    found = find_placement(environ)
    assert found is not None
    assert found.meeting_point is not None
    assert FIRST_PORT <= found.meeting_point.port < FIRST_PORT + PORTS


def test_other_jobs_and_steps_get_other_ports() -> None:
    found = [
        find_placement(slurm(0, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)))
        for job in range(10)
        for step in range(3)
    ]
    assert len({one.meeting_point for one in found if one is not None}) > 25


def test_a_reserved_port_is_used() -> None:
    found = find_placement(slurm(0, SLURM_STEP_RESV_PORTS="12345-12346"))
    assert found is not None
    assert found.meeting_point == Address("127.0.0.1", 12345)


def test_a_run_of_its_own_ignores_the_meeting_point() -> None:
    assert find_placement(slurm(0), on="local", meet=MEET) is None


def test_the_user_may_name_the_meeting_point() -> None:
    found = [find_placement(environ, meet=Address("10.0.0.1", 4000)) for environ in RUNS[1].environments]
    assert {one.meeting_point for one in found if one} == {Address("10.0.0.1", 4000)}
    found = [find_placement(environ, port=4001) for environ in RUNS[1].environments]
    assert {one.meeting_point for one in found if one} == {Address("n01", 4001)}


@pytest.mark.parametrize(
    ("environ", "options", "error", "message"),
    [
        ({}, {"on": "lsf"}, InvalidArgument, f"--on: 'lsf' is not one of {', '.join(NAMES)}"),
        ({}, {"on": "slurm"}, NotFound, "SLURM_STEP_NUM_TASKS or SLURM_NTASKS: not set in the environment"),
        ({}, {"meet": MEET}, InvalidArgument, "--meet: no scheduler has started several processes here"),
        ({}, {"port": 1234}, InvalidArgument, "--port: no scheduler has started several processes here"),
        (slurm(0), {"meet": MEET, "port": 1}, InvalidArgument, "--port: --meet HOST:PORT has a port already"),
        (RUNS[4].environments[2], {}, InvalidArgument, "--meet: rank 2 of 4 .mpi. is one of 3 on this host"),
        (RUNS[1].environments[3], {"meet": Address("127.0.0.1", 9)}, InvalidArgument, "--meet: 127.0.0.1:9 cannot be"),
        (slurm(2), {}, InvalidArgument, "slurm: the rank is 2 of 2; it must be in 0..1"),
        (slurm(0, SLURM_NODEID="1"), {}, InvalidArgument, r"SLURM_STEP_TASKS_PER_NODE: \[2\] has no node 1"),
        (slurm(0, SLURM_STEP_TASKS_PER_NODE="x"), {}, InvalidArgument, "SLURM_STEP_TASKS_PER_NODE: 'x' is no list"),
        (kubernetes(0, HOSTNAME="digits"), {}, InvalidArgument, "HOSTNAME: 'digits' does not end with the index"),
    ],
)
def test_mistakes_are_named(
    environ: dict[str, str], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_placement(environ, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("n[01-03,07],login", "n01"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]n[05-06]-ib,x", "rack1n05-ib"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
