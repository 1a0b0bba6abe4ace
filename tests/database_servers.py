"""Real PostgreSQL and MariaDB servers on loopback, for tests; nothing outside of a temporary folder is touched."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _account(*names: str) -> tuple[list[str], str | None]:  # (command prefix, account that owns the data)
    if os.geteuid() != 0:
        return [], None
    if not shutil.which("setpriv"):
        pytest.skip("a database server does not run as root, and setpriv is not there to become someone else")
    for name in names:
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            return ["setpriv", f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"], name
    pytest.skip(f"no account of {names} to run a database server as")


@contextlib.contextmanager
def _home(owner: str | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="server-"))
    try:
        if owner:
            shutil.chown(folder, owner)
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(port: int, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    process.kill()
    raise OSError(f"the database server did not start: {log.read_text(errors='replace')[-300:]}")


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def needs_postgresql() -> None:
    "Skip a test where a package is missing, or where nobody can be found that PostgreSQL runs as."
    pytest.importorskip("psycopg")
    from healthrag.storage.pgserver import postgres_binaries

    try:
        postgres_binaries()
    except ImportError as error:
        pytest.skip(str(error))
    _account("nobody")


@contextlib.contextmanager
def postgresql(
    scheme: str = "postgresql",  # of the address; SQLAlchemy's is "postgresql+psycopg"
) -> Iterator[str]:  # an address of the superuser
    "Run PostgreSQL with pgvector, where its wheel is installed; a server that does not start is a fault."
    needs_postgresql()
    from healthrag.storage.pgserver import PostgresServer

    with PostgresServer() as server:
        yield server.url.replace("postgresql", scheme, 1)


@contextlib.contextmanager
def mariadb() -> Iterator[str]:  # an SQLAlchemy address of the superuser
    "Run MariaDB from the system's package."
    pytest.importorskip("pymysql")
    server, setup = (shutil.which(n, path=f"{os.environ['PATH']}:/usr/sbin") for n in ("mariadbd", "mariadb-install-db"))
    if not server or not setup:
        pytest.skip("MariaDB is not here; apt-get install mariadb-server-core mariadb-client")
    become, owner = _account("mysql", "nobody")
    with _home(owner) as home:
        made = subprocess.run(
            [*become, setup, "--no-defaults", f"--datadir={home / 'data'}", "--auth-root-authentication-method=normal", "--skip-test-db"],
            capture_output=True, text=True, cwd=home,
        )  # fmt: skip
        assert not made.returncode, f"MariaDB could not be set up: {made.stderr[-300:]}"
        port, log = free_port(), home / "log"
        with log.open("wb") as out:
            command = [server, "--no-defaults", f"--datadir={home / 'data'}", "--bind-address=127.0.0.1", f"--port={port}"]
            command += [f"--socket={home / 's'}", f"--pid-file={home / 'pid'}", "--innodb-flush-log-at-trx-commit=0"]
            process = subprocess.Popen([*become, *command], stdout=out, stderr=out, cwd=home)
        try:
            _wait(port, process, log)
            import pymysql

            with contextlib.closing(pymysql.connect(host="127.0.0.1", port=port, user="root")) as connection:
                connection.cursor().execute("CREATE DATABASE clinic CHARACTER SET utf8mb4")
            yield f"mariadb+pymysql://root@127.0.0.1:{port}/clinic?charset=utf8mb4"
        finally:
            _stop(process)
