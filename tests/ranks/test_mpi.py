"""Ranks over MPI: equal bytes with both libraries, on one machine and between two networks, and the loss of a rank.

The libraries come from PyPI, into `target/mpi` or the folder that PELLUCID_MPI names. One that cannot be installed is
skipped with a line that says so, and so are the networks, which need the rights of an administrator.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving import MODEL, TIMEOUT_S, Client

FOLDER = Path(os.environ.get("PELLUCID_MPI", Path(__file__).parents[2] / "target/mpi"))
PACKAGES = {"mpich": "mpich==5.0.2", "impi": "impi-rt==2021.19.0"}
REPLY = ["--max-tokens", "24", "--seed", "7", "--temperature", "1.5", "--json"]
PROVE = ["prove", "--prompts", "6", "--longest", "40", "--reply", "6", "--together", "3", "--json"]
QUIET = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
# Seconds in which a job must end when a rank is lost; a rank that hangs is noticed after --rank-timeout.
RANK_TIMEOUT_S, END_S = 3, 15


class Mpi:
    """An installed MPI: its launcher, its library, and what they need in the environment."""

    def __init__(self, name):
        self.name, self.prefix = name, FOLDER / name
        self.library = self.prefix / "lib/libmpi_abi.so.1"

    def install(self):
        if self.library.exists():
            return
        shutil.rmtree(self.prefix, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.prefix], check=True, timeout=TIMEOUT_S)
        pip = [self.prefix / "bin/python", "-m", "pip", "--quiet", "install", "--no-deps"]
        subprocess.run([*pip, PACKAGES[self.name]], check=True, timeout=240)

    @property
    def environment(self):
        # Intel's package has no libfabric of its own; that of MPICH's serves both.
        folders = [self.prefix / "lib", FOLDER / "mpich/lib/mpich"]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders)), "FI_PROVIDER": "tcp"}
        if self.name == "impi":
            environment |= {"I_MPI_ROOT": str(self.prefix), "I_MPI_FABRICS": "shm"}
        return environment

    def start(self, ranks, *words, launcher=(), **options):
        command = [self.prefix / "bin/mpiexec", *launcher, "-n", str(ranks), *words]
        command += ["--ranks", "mpi", "--mpi-library", self.library, "--threads", "1"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {**pipes, "text": True, **options}
        return subprocess.Popen([str(word) for word in command], env=self.environment, **options)

    def run(self, ranks, *words, **options):
        job = self.start(ranks, *words, **options)
        try:
            output, errors = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
        assert job.returncode == 0, (job.returncode, output, errors)
        return output


@pytest.fixture(scope="module", params=PACKAGES)
def mpi(request):
    for name in dict.fromkeys(["mpich", request.param]):
        try:
            Mpi(name).install()
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{PACKAGES[name]} could not be installed from PyPI: {error}")
    return Mpi(request.param)


@pytest.fixture(scope="module")
def mpich(tmp_path_factory):
    try:
        Mpi("mpich").install()
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{PACKAGES['mpich']} could not be installed from PyPI: {error}")
    return Mpi("mpich")


def reply(text):
    """What must be equal of a reply: everything but its times."""
    document = json.loads(text)
    assert document["choices"] if "choices" in document else document["text"], document
    is_time = lambda name: "time" in name or name.endswith(("_ms", "second")) or name in ("stats", "device", "seconds")
    return {name: value for name, value in document.items() if not is_time(name)}


def alone(binaries, model, *words):
    command = [binaries / "pellucid", "run", "--model", model, "--threads", "1", *words]
    return subprocess.run(command, check=True, **QUIET).stdout


def test_replies_are_the_same_on_one_to_four_ranks(binaries, model, mpi):
    expected = reply(alone(binaries, model, "hello", *REPLY))
    for ranks in (1, 2, 3, 4):
        found = mpi.run(ranks, binaries / "pellucid", "run", "--model", model, "hello", *REPLY)
        assert reply(found) == expected, f"{ranks} ranks with {mpi.name}"


def test_prove_compares_ranks_with_one_thread(binaries, model, mpi):
    found = json.loads(mpi.run(2, binaries / "pellucid", *PROVE, model))
    assert found["verdict"] == "proved" and found["different"] == 0, found


def test_a_server_on_ranks_answers_drains_and_ends(binaries, model, mpi, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as errors:
        words = [binaries / "pellucid", "serve", "--model", model, "--served-model-name", MODEL, "--port", "0"]
        job = mpi.start(3, *words, stderr=errors)
        try:
            client = Client(listening(job, log))
            first = client.chat("hello")
            assert first.status == 200 and first.json["usage"]["completion_tokens"] > 0, first
            assert client.chat("hello").json["choices"] == first.json["choices"]
            job.send_signal(signal.SIGTERM)
            job.wait(TIMEOUT_S)
        finally:
            job.kill()
    text = log.read_text()
    assert "shut down: every reply was finished" in text, text
    assert text.count("listening") == 1, "only rank 0 reports"


def test_a_killed_rank_ends_the_job(binaries, model, mpi, tmp_path):
    with serving(binaries, model, mpi, tmp_path) as (job, _):
        os.kill(rank_processes(job)[1], signal.SIGKILL)
        started = time.monotonic()
        assert job.wait(END_S) != 0
        assert time.monotonic() - started < END_S


def test_a_rank_that_hangs_ends_the_job_with_its_reason(binaries, model, mpi, tmp_path):
    with serving(binaries, model, mpi, tmp_path) as (job, client):
        hung = rank_processes(job)[1]
        os.kill(hung, signal.SIGSTOP)
        started = time.monotonic()
        try:
            client.chat("hello")
        except OSError:
            pass
        try:
            # A stopped process cannot be ended by its launcher in every case; the other ranks are.
            while alive(rank_processes(job), hung) and time.monotonic() - started < RANK_TIMEOUT_S + END_S:
                time.sleep(0.1)
        finally:
            try:
                os.kill(hung, signal.SIGCONT)
            except ProcessLookupError:
                pass
        assert job.wait(END_S) != 0
    text = (tmp_path / "log").read_text()
    assert f"did not answer within {RANK_TIMEOUT_S} s" in text, text


def test_different_instruction_sets_are_refused(binaries, model, mpich):
    words = ["--ranks", "mpi", "--mpi-library", mpich.library, "--threads", "1"]
    run = [binaries / "pellucid", "run", "--model", model, "hello"]
    command = [mpich.prefix / "bin/mpiexec", "-n", "1", *run, *words, "--cpu-isa", "avx2"]
    command += [":", "-n", "1", *run, *words, "--cpu-isa", "scalar"]
    command = [str(word) for word in command]
    found = subprocess.run(command, env=mpich.environment, **QUIET)
    assert found.returncode != 0
    assert "the arithmetic is cpu (scalar) there, and cpu (avx2) on rank 0" in found.stderr, found.stderr


def test_ranks_in_two_networks_exchange_over_tcp(binaries, model, mpich, tmp_path):
    with networks() as addresses:
        launch = tmp_path / "launch"
        names = dict(zip(addresses, NETWORKS))
        # The launcher starts a proxy on each other host with `launch HOST COMMAND`: in the network of that address,
        # with another name and its own shared memory, as on another machine. Otherwise MPI would not use the network.
        cases = "\n".join(f"  {address}) network={name} ;;" for address, name in names.items())
        launch.write_text(
            f"#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\nhost=$1; shift\n"
            f"case $host in\n{cases}\nesac\nexec ip netns exec $network unshare --uts --ipc --mount "
            "sh -c \"hostname $network; mount -t tmpfs tmpfs /dev/shm; $*\"\n"
        )
        launch.chmod(0o755)
        hosts = ["-launcher", "ssh", "-launcher-exec", launch, "-hosts", ",".join(addresses), "-ppn", "1"]
        hosts += ["-iface", "veth-rank", "-genvall"]
        inside = ["ip", "netns", "exec", NETWORKS[0]]
        command = [*inside, mpich.prefix / "bin/mpiexec", *hosts, "-n", "2", binaries / "pellucid", *PROVE, model]
        command += ["--ranks", "mpi", "--mpi-library", mpich.library, "--threads", "1"]
        # Few variables: the launcher repeats all of them in a command line.
        kept = {name: mpich.environment[name] for name in ("HOME", "PATH", "LD_LIBRARY_PATH", "FI_PROVIDER")}
        environment = {**kept, "MPIR_CVAR_NOLOCAL": "1", "FI_TCP_IFACE": "veth-rank"}
        before = received()
        command = [str(word) for word in command]
        found = subprocess.run(command, env=environment, **QUIET)
        assert found.returncode == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["verdict"] == "proved" and document["different"] == 0, document
        assert received() - before > 1_000_000, "the rows did not go over the network"


NETWORKS = ["pellucid-rank-0", "pellucid-rank-1"]


def received():
    """Bytes that the second network received."""
    counter = "/sys/class/net/veth-rank/statistics/rx_bytes"
    command = ["ip", "netns", "exec", NETWORKS[1], "cat", counter]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


class networks:
    """Two network namespaces with one cable between them."""

    def __enter__(self):
        addresses = ["10.213.7.1", "10.213.7.2"]
        try:
            for name in NETWORKS:
                self.ip("netns", "add", name)
            self.ip("link", "add", "veth-rank", "netns", NETWORKS[0], "type", "veth", "peer", "name", "veth-rank",
                    "netns", NETWORKS[1])
            for name, address in zip(NETWORKS, addresses):
                self.ip("-n", name, "address", "add", f"{address}/24", "dev", "veth-rank")
                self.ip("-n", name, "link", "set", "veth-rank", "up")
                self.ip("-n", name, "link", "set", "lo", "up")
            # A new link passes nothing in its first seconds.
            time.sleep(3)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', None) or error}")
        return addresses

    def __exit__(self, *_):
        for name in NETWORKS:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class serving:
    """A server on three ranks: the job, and a client once it listens."""

    def __init__(self, binaries, model, mpi, folder):
        self.log = folder / "log"
        words = [binaries / "pellucid", "serve", "--model", model, "--served-model-name", MODEL, "--port", "0"]
        with self.log.open("w") as errors:
            self.job = mpi.start(3, *words, "--rank-timeout", str(RANK_TIMEOUT_S), stderr=errors)

    def __enter__(self):
        return self.job, Client(listening(self.job, self.log))

    def __exit__(self, *_):
        self.job.kill()
        self.job.wait()


def listening(job, log):
    """Waits until the server listens, and returns its address."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        text = log.read_text()
        if "try: " in text:
            return "http://" + text.split("url=\"http://")[1].split("\"")[0]
        assert job.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def rank_processes(job):
    """The processes of the ranks that the launcher started, in ascending order of their ids."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    children = {}
    for pid, parent, name in rows:
        children.setdefault(int(parent), []).append((int(pid), name))
    found, todo = [], [job.pid]
    while todo:
        for pid, name in children.get(todo.pop(), []):
            found += [pid] if name.startswith("pellucid") else []
            todo.append(pid)
    return sorted(found)


def alive(processes, hung):
    return any(process != hung for process in processes)
