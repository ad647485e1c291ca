"""The cluster on one machine: hosts apart, links limited, nothing left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from horovod_gradcomp.core.errors import GradCompError, SettingsError
from horovod_gradcomp.lab import Cluster, Host, Traffic, cleanup, cluster, network
from tests.distributed.launch import FOLDER, ROOT, WORKERS, leftovers
from tests.distributed.workers.lab_rate import NBYTES

REAL = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks"),
]


def real(test):
    for mark in REAL:
        test = mark(test)
    return test


def command(*args, hosts=2):
    return [sys.executable, "-m", "horovod_gradcomp", "lab", "--hosts", str(hosts), *args]


def environment(folder):
    return {
        **os.environ,
        FOLDER: str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def lab(folder, *args, hosts=2):
    done = subprocess.run(
        command(*args, hosts=hosts),
        capture_output=True,
        text=True,
        timeout=150,
        env=environment(folder),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert leftovers(folder) == []
    return done


def wait_for(true, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# What a lab is made of --------------------------------------------------------------------------


def test_all_names_are_our_own():
    hosts = [Host(7, 0, 125e6), Host(7, 1, 125e5)]
    commands = [" ".join(one) for one in network.build(hosts)]
    added = [one.split()[-1] for one in commands if " netns add " in one]
    assert added == ["gradcomp-lab7-switch", "gradcomp-lab7-host0", "gradcomp-lab7-host1"]
    for one in commands:  # all else happens inside of these
        assert " netns add " in one or re.match(r"(ip|tc) -n gradcomp-lab7-", one), one


def test_both_ends_of_a_link_are_limited():
    limits = [one for one in network.build([Host(0, 0, 125e6)]) if "tbf" in one]
    assert [(one[2], one[6]) for one in limits] == [
        ("gradcomp-lab0-switch", "port0"),
        ("gradcomp-lab0-host0", "eth0"),
    ]
    assert all("1000000000bit" in one for one in limits)


def test_a_delay_comes_before_the_limit():
    delay, rate = network.limit("name", "eth0", 125e6, 0.2e-3)
    assert delay[:8] == ["tc", "-n", "name", "qdisc", "add", "dev", "eth0", "root"]
    assert delay[8:13] == ["handle", "1:", "netem", "delay", "200us"]
    assert int(delay[-1]) >= 1000
    assert rate[7:12] == ["parent", "1:1", "handle", "2:", "tbf"]
    (alone,) = network.limit("name", "eth0", 125e6, 0.0)
    assert "netem" not in alone


def test_the_name_of_the_machine_is_the_host():
    before = "127.0.0.1 localhost\n127.0.1.1 box box.lan # box\n10.0.0.1 other\n"
    after = network.hosts_file("box", "10.94.0.1", before)
    assert after == "127.0.0.1 localhost\n10.0.0.1 other\n10.94.0.1 box\n"


def test_traffic_is_a_difference():
    assert Traffic(10, 7) - Traffic(4, 2) == Traffic(6, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "0 hosts"),
        ({"hosts": 201}, "1 to 200"),
        ({"bandwidth": 0.0}, "bandwidth of 8 kbit/s"),
        ({"bandwidth": float("nan")}, "bandwidth of 8 kbit/s"),
        ({"latency": -1.0}, "latency of -1"),
        ({"slow": {2: 1e6}}, "host from 0 to 1"),
        ({"slow": {1: 0.0}}, "bandwidth of 8 kbit/s"),
    ],
)
def test_what_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        Cluster(**{"hosts": 2, "bandwidth": 125e6, **settings})


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (cluster.platform, ("system", "Darwin"), "got Darwin; expected Linux"),
        (cluster.os, ("geteuid", 1000), "got user 1000; expected root"),
        (cluster.shutil, ("which", None), "install iproute2"),
    ],
)
def test_where_it_cannot_work(where, value, message, monkeypatch):
    monkeypatch.setattr(where, value[0], lambda *_: value[1])
    with pytest.raises(GradCompError, match=message), Cluster(hosts=2, bandwidth=125e6):
        pass


def test_what_the_kernel_refuses_is_told(monkeypatch):
    with pytest.raises(GradCompError, match=r"no netem.*$"):
        cluster._do(["sh", "-c", "echo netem; exit 2", "netem"])
    with pytest.raises(GradCompError, match=r"'false'.*CAP_NET_ADMIN"):
        cluster._do(["false"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bandwidth", "1", "--", "true"), "--bandwidth '1'"),
        (("--slow-host", "1", "--", "true"), "as in 1:100mbit"),
        (("--slow-host", "7:1mbit", "--", "true"), "host 7"),
    ],
)
def test_errors_of_use(args, message, tmp_path):
    done = lab(tmp_path, *args)
    assert done.returncode == 2
    assert message in done.stderr


# Real ones --------------------------------------------------------------------------------------


@real
def test_the_interface_counts_what_the_compressor_counts(tmp_path):
    """Beside payloads there are headers, and some messages by which ranks agree what is next."""
    forms = ["none", "fp16", "linear", "topk"]
    done = lab(tmp_path, "--", sys.executable, str(WORKERS / "lab_bytes.py"), *forms)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line[4:]) for line in done.stdout.splitlines() if '"size"' in line]
    assert [report["size"] for report in reports] == [2, 2]
    for report in reports:
        for form in forms:
            told, counted = (report["found"][form][key] for key in ("told", "counted"))
            assert told <= counted <= 1.02 * told + 100_000 * report["steps"], form
    assert reports[0]["found"]["topk"]["counted"] < 0.03 * reports[0]["found"]["none"]["counted"]


@real
def test_a_host_of_several_ranks_sends_one_payload(tmp_path):
    """In a hierarchical exchange: what stays inside a host is not on its interface."""
    form = "linear:bits=4,exchange=hierarchical"
    worker = [sys.executable, str(WORKERS / "lab_bytes.py"), form]
    done = lab(tmp_path, "--ranks-per-host", "2", "--", *worker)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line[4:]) for line in done.stdout.splitlines() if '"size"' in line]
    assert sorted(report["host"] for report in reports) == [0, 0, 1, 1]
    for host in (0, 1):
        mine = [report for report in reports if report["host"] == host]
        told = sum(report["found"][form]["told"] for report in mine)
        steps = mine[0]["steps"]
        for report in mine:
            assert report["found"][form]["inside"] > 4 * told
            assert 0.95 * told <= report["found"][form]["counted"] <= 1.05 * told + 150_000 * steps


@real
def test_a_slow_host_has_a_slow_link(tmp_path):
    file = tmp_path / "lab.json"
    worker = [sys.executable, str(WORKERS / "lab_rate.py")]
    done = lab(tmp_path, "--slow-host", "1:8mbit", "--json", str(file), "--", *worker)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[0] address 10.94.0.1 local_rank 0", "[1] address 10.94.0.2 local_rank 0"} <= set(
        done.stdout.splitlines()
    )
    seconds = float(re.search(r"seconds (\S+)", done.stdout)[1])
    burst = int(network.limit("", "", 1e6, 0.0)[0][12])
    assert seconds > 0.95 * (NBYTES - 2 * burst) / 1e6
    assert seconds < 4
    first, second = json.loads(file.read_text())["hosts"]
    assert NBYTES < second["bytes_sent"] < 1.1 * NBYTES
    assert NBYTES < first["bytes_received"] < 1.1 * NBYTES
    assert first["bytes_sent"] < 0.1 * NBYTES
    assert "8 Mbit/s" in done.stderr


@real
def test_a_rank_that_fails_ends_the_others(tmp_path):
    start = time.monotonic()
    shell = 'test "$HOROVOD_LOCAL_RANK$HOROVOD_CROSS_RANK" = 10 && exit 3; sleep 100'
    done = lab(tmp_path, "--ranks-per-host", "2", "--", "sh", "-c", shell)
    assert done.returncode == 3
    assert time.monotonic() - start < 60
    assert cleanup.sweep() == []


@real
def test_time_is_limited(tmp_path):
    done = lab(tmp_path, "--timeout", "1", "--", "sleep", "100", hosts=1)
    assert done.returncode == 2
    assert "ranks after 1 s" in done.stderr


@contextlib.contextmanager
def running(folder):
    """Run a lab whose ranks sleep, up to where they do.

    As a terminal starts it: in the background SIGINT is ignored, also by what is started there.
    """
    with subprocess.Popen(
        command("--", "sleep", "100"),
        env=environment(folder),
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            wait_for(lambda: len(_sleeping(folder)) == 2)
            yield process
        finally:
            process.kill()


def _sleeping(folder):
    out = []
    for pid in leftovers(folder):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0"):
                out.append(pid)
    return out


@real
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(how, tmp_path):
    with running(tmp_path) as process:
        assert cleanup.sweep() == []  # what is in use is left alone
        process.send_signal(how)
        assert process.wait(30) != 0
    assert leftovers(tmp_path) == []
    assert cleanup.sweep() == []


@real
def test_the_next_start_takes_away_what_a_killed_one_left(tmp_path):
    with running(tmp_path) as process:
        process.kill()
        process.wait(30)
        assert len(_sleeping(tmp_path)) == 2
    done = lab(tmp_path, "--", "true", hosts=1)  # says that nothing of ours runs any more
    assert done.returncode == 0, done.stderr
    assert cleanup.sweep() == []
