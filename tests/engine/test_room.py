"""Pinned host memory of a rank is bounded by the free memory of machine and container."""

from pathlib import Path

import pytest

from verl_pg_plugin.engine.activations import HOST_RESERVE, host_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 100 GiB with 90 available, outside of any control group."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {100 * 2**20} kB\nMemAvailable: {90 * 2**20} kB\nHugePages_Total: 0\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    for name in ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def limit(folder: Path, names: tuple[str, str, str], most: object, used: float, files: float) -> None:
    write(folder / names[0], f"{most}\n")
    write(folder / names[1], f"{int(used * GIB)}\n")
    write(folder / "memory.stat", f"anon 5\n{names[2]} {int(files * GIB)}\n")


VERSION1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION2 = ("memory.max", "memory.current", "inactive_file")


def test_ranks_share_free_memory_without_the_reserve(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 90 - 100 * HOST_RESERVE
    assert host_bytes(root) == pytest.approx(free * GIB)
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as verl's workers set it
    assert host_bytes(root) == pytest.approx(free / 8 * GIB)


@pytest.mark.parametrize("shown", [True, False], ids=["path shown", "path hidden by the container"])
def test_a_cgroup_v2_limit_counts_without_inactive_files(root: Path, shown: bool) -> None:
    write(root / "proc/self/cgroup", "0::/slurm/job_7/step\n")
    folder = root / "sys/fs/cgroup" / ("slurm/job_7" if shown else "")
    limit(folder, VERSION2, 50 * GIB, used=30, files=20)
    assert host_bytes(root) == pytest.approx((50 * (1 - HOST_RESERVE) - 10) * GIB)
    limit(folder, VERSION2, "max", used=30, files=20)
    assert host_bytes(root) == pytest.approx((90 - 100 * HOST_RESERVE) * GIB)


def test_a_cgroup_v1_limit_counts_down_to_zero(root: Path) -> None:
    write(root / "proc/self/cgroup", "8:pids:/x\n4:cpu,memory:/docker/abc\n0::/\n")
    limit(root / "sys/fs/cgroup/memory", VERSION1, 40 * GIB, used=12, files=2)
    (root / "sys/fs/cgroup/memory/memory.stat").rename(root / "stat")  # some containers have none
    assert host_bytes(root) == pytest.approx((40 * (1 - HOST_RESERVE) - 12) * GIB)
    (root / "stat").rename(root / "sys/fs/cgroup/memory/memory.stat")
    assert host_bytes(root) == pytest.approx((40 * (1 - HOST_RESERVE) - 10) * GIB)
    limit(root / "sys/fs/cgroup/memory/docker/abc", VERSION1, 20 * GIB, used=19, files=0)
    assert host_bytes(root) == 0
