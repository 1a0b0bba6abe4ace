"""A query runs in a process that can be killed, and gives there what it gives here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from healthrag.omop import CDM, Sandbox

pytestmark = pytest.mark.timeout(300, func_only=True)  # the database may have to be built first


@pytest.fixture(scope="module")
def sandbox(cdm):
    with Sandbox(cdm) as opened:
        yield opened


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT person_id, birth_datetime, year_of_birth FROM person ORDER BY 1 LIMIT 50",
        "SELECT 1 AS a, 2 AS a, NULL AS b, TRUE AS c, 'é\u2028 \"x\"' AS d, 9007199254740993 AS e, 1.5::DOUBLE AS f, 'NaN'::DOUBLE AS g, '-inf'::DOUBLE AS h",
        "SELECT DATE '2020-02-29' AS d, TIMESTAMP '2020-01-01 12:00:00.123456' AS t, TIME '01:02:03' AS u, INTERVAL 3 DAY AS i, 12.340::DECIMAL(8, 3) AS x",
        "SELECT {'a': 1, 'b': [1, 2]} AS s, [DATE '2020-01-01', NULL] AS l, 'ab'::BLOB AS y WHERE TRUE",
        "SELECT person_id FROM person WHERE FALSE",
    ],
)
def test_the_result_is_the_databases_own(sandbox, cdm, sql):
    here, there = cdm.execute(sql), sandbox.execute(sql)
    assert repr(there) == repr(here)  # NaN is not equal to itself


def test_row_limits_and_truncation_are_kept(sandbox):
    assert len(sandbox.execute("SELECT * FROM person", row_limit=7)) == 7 and sandbox.execute("SELECT * FROM person", row_limit=7).truncated


@pytest.mark.parametrize("sql", ["", "SELECT 1; SELECT 2", "SELECT", "DROP TABLE person", "SELECT nothing FROM person", "SELECT '\ud800'", None, 3, "SELECT * FROM read_text('/etc/passwd')"])
def test_errors_are_the_databases_own(sandbox, cdm, sql):
    with pytest.raises((ValueError, TypeError)) as here:
        cdm.execute(sql)
    with pytest.raises(type(here.value)) as there:
        sandbox.execute(sql)
    assert str(there.value) == str(here.value)


@pytest.mark.parametrize("sql", ["SELECT levenshtein(repeat('ab', 400000), repeat('ba', 400000))", "SELECT COUNT(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range % 7 = 1"])
def test_what_takes_too_long_is_stopped_whether_the_database_can_or_not(cdm, sql):
    with Sandbox(cdm, grace=0.5) as sandbox:
        with pytest.raises(TimeoutError, match=r"ran longer than 0\.2 s"):
            sandbox.execute(sql, time_limit=0.2)
        assert sandbox.execute("SELECT 1 AS a").rows == ((1,),)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits of POSIX")
def test_memory_that_the_database_does_not_count_is_limited(cdm):
    with CDM(cdm.path, memory_limit="200MB") as small, Sandbox(small) as sandbox:
        with pytest.raises(MemoryError):
            sandbox.execute("SELECT length(replace(repeat('a', 3000000), 'a', repeat('b', 1000)))", time_limit=250)
        assert sandbox.execute("SELECT 1 AS a").rows == ((1,),)


@pytest.mark.parametrize("sql", ["SELECT repeat(repeat('x', 10000), 6000) AS a", "SELECT range(1000000) FROM range(9)", "SELECT repeat(chr(1), 10000) FROM range(1000)"])
def test_an_answer_that_is_too_large_stays_in_the_process(sandbox, sql):
    with pytest.raises(ValueError, match="more than 50 MB; select fewer"):
        sandbox.execute(sql, time_limit=250)  # millions of values take their time on a busy machine
    assert len(sandbox.execute("SELECT repeat('x', 10000) FROM range(4000)", time_limit=250)) == 4000


def test_a_process_that_dies_is_replaced(cdm):
    with Sandbox(cdm) as sandbox:
        sandbox.execute("SELECT 1")
        os.kill(sandbox._process.pid, signal.SIGKILL)
        with pytest.raises(MemoryError, match="ended its process"):
            sandbox.execute("SELECT 1")
        assert sandbox.execute("SELECT 2 AS a").rows == ((2,),)


def test_an_interrupted_query_leaves_no_answer_to_the_next(cdm, monkeypatch):
    from healthrag.omop import sandbox as module

    def interrupted(requests, answers, request):
        requests.write(request + "\n")
        requests.flush()
        raise KeyboardInterrupt

    with Sandbox(cdm) as sandbox:
        assert sandbox.execute("SELECT 1 AS a").rows == ((1,),)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, "_exchange", interrupted)
            sandbox.execute("SELECT 2 AS a")
        assert [sandbox.execute(f"SELECT {n} AS a").rows for n in (3, 4)] == [((3,),), ((4,),)]


def test_threads_take_turns_and_get_their_own_answers(sandbox):
    answers: dict[int, int] = {}
    workers = [threading.Thread(target=lambda n=n: answers.update({n: sandbox.execute(f"SELECT {n} AS n").rows[0][0]})) for n in range(20)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert answers == {n: n for n in range(20)}


def test_no_process_is_left_behind(cdm):
    with CDM(cdm.path) as opened:
        opened.sandbox.execute("SELECT 1")
        process = opened.sandbox._process
        assert opened.sandbox is opened.sandbox and process.poll() is None
    assert process.poll() is not None
    with pytest.raises(ValueError, match="closed"):
        opened.sandbox  # noqa: B018
    code = "from healthrag.omop import open_omop; s = open_omop('gibleed').sandbox; s('SELECT 1'); print(s._process.pid, flush=True); import os; os._exit(1)"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    while runs(child):  # until the pipe has closed with its parent; one that outlives it ends at the time limit of this test
        time.sleep(0.05)


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between two looks
        return False


def test_a_database_that_is_gone_is_told(cdm, tmp_path):
    import shutil

    copy = tmp_path / "copy.duckdb"
    shutil.copy(cdm.path, copy)
    with CDM(copy) as opened:
        copy.unlink()
        with pytest.raises(OSError, match=r"did not start: .*does not exist"):
            opened.sandbox.execute("SELECT 1")
