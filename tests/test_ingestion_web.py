"""Fetching from hostile servers, pages as documents, searches that stay off."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("trafilatura")

from hypothesis import given, settings
from hypothesis import strategies as st
from web_server import PROSE, web_site

from healthrag.ingestion.documents import LabelledDocument, Skipped
from healthrag.ingestion.fetch import checked_url, fetch_page, is_public_address, resolve_public
from healthrag.ingestion.html import html_links, html_to_text, whole_page_text
from healthrag.ingestion.search import DuckDuckGoProvider, SearchResult, read_search, web_search
from healthrag.ingestion.sources import IngestSource, ingest, read_source
from healthrag.ingestion.web import CURATED_SOURCES, fetch_curated, fetch_url, read_curated, read_page, read_site
from healthrag.phi import PHIError
from healthrag.records import SourceDocument
from healthrag.retrieval.update import ingest_to_index


@pytest.fixture(scope="module")
def site():
    with web_site() as running:
        yield running


@pytest.fixture
def get(site):
    return lambda path, **options: fetch_page(site.url(path), **{"allow_private": [site.host], "timeout": 60, "attempts": 1, **options})


# ---------------------------------------------------------------- where it may lead

PRIVATE = """127.0.0.1 127.255.255.254 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 255.255.255.255 224.0.0.1 198.18.0.1
192.0.2.1 240.0.0.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd12::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.1.2.3 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
2002:7f00:1:: 2002:a00:1:: 2001:db8::1 64:ff9b:1::1 fec0::1 feff::1 3fff::1 192.88.99.1 168.63.129.16 2606:2800::5efe:10.0.0.1 2606:2800::200:5efe:127.0.0.1
::ffff:168.63.129.16 64:ff9b::a83f:8110""".split()


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_told(address):
    assert not is_public_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::808:808", "::ffff:8.8.8.8", "2606:2800::5efe:8.8.8.8"])
def test_public_addresses_are_told(address):
    assert is_public_address(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "[::1]", "0"])
def test_this_machine_is_refused_however_it_is_written(site, host):
    before = len(site.asked)
    with pytest.raises(PermissionError, match="not a public address"):
        fetch_page(f"http://{host}:{site.server_port}/page", attempts=1)
    assert len(site.asked) == before


@pytest.mark.parametrize("target", ["http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/", "http://[::1]:1/", "http://127.0.0.1:1/", "//192.168.0.1/"])
def test_a_redirect_to_a_private_address_is_refused(site, get, target):
    with pytest.raises(PermissionError, match="not a public address"):
        get(f"/redirect/{target}")


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://example.org/", "gopher://x/", "javascript:alert(1)", "http://me:pw@example.org/"])
def test_a_redirect_to_another_scheme_is_refused(get, target):
    with pytest.raises(ValueError, match=r"only http|name or password"):
        get(f"/redirect/{target}")


def test_the_address_that_was_checked_is_the_one_that_is_contacted(site, monkeypatch):
    import socket

    answers = iter(["93.184.215.14", "127.0.0.1"])  # a name that turns to this machine after the check

    def lookup(host, port, *a, **k):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    contacted = []
    import httpcore

    def connect(self, host, port, *a, **k):
        contacted.append(host)
        raise httpcore.ConnectError("stop here")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(ConnectionError):
        fetch_page("http://rebind.example/", attempts=1)
    assert contacted == ["93.184.215.14"]


def test_one_private_address_among_several_refuses_the_host(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda h, p, **k: [(2, 1, 6, "", ("93.184.215.14", p)), (2, 1, 6, "", ("10.0.0.1", p))])
    with pytest.raises(PermissionError, match=r"10\.0\.0\.1"):
        resolve_public("mixed.example", 80)


def test_only_the_named_host_may_be_private(site):
    assert fetch_page(site.url("/status/200"), allow_private=[site.host]).body == b""
    assert fetch_page(site.url("/status/200"), allow_private=["127.0.0.1"]).body == b""
    assert fetch_page(site.url("/status/200"), allow_private=True).body == b""
    with pytest.raises(PermissionError):
        fetch_page(site.url("/status/200"), allow_private=["127.0.0.1:1"])
    with pytest.raises(PermissionError):
        fetch_page(site.url("/redirect/http://127.0.0.2:1/"), allow_private=[site.host])


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_an_address_or_a_clear_error(text):
    try:
        url = checked_url(text)
    except ValueError as error:
        assert str(error)
    else:
        assert url.startswith(("http://", "https://")) and checked_url(url) == url and url.isascii()


# ---------------------------------------------------------------- how long, how large


def test_redirects_are_followed_and_told(site, get):
    site.pages["/here"] = ("text/html", b"<p>x</p>")
    page = get("/redirect//here")
    assert page.body == b"<p>x</p>" and page.address == site.url("/here") and page.url.endswith("/redirect//here")


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("/redirect//redirect//redirect/", ConnectionError, "where to"),
        ("/chain/1", ConnectionError, "more than 5 times"),
        ("/nowhere", ConnectionError, "where to"),
        ("/status/404", FileNotFoundError, "404"),
        ("/status/410", FileNotFoundError, "410"),
        ("/status/403", ConnectionError, "403"),
        ("/status/500", ConnectionError, "500"),
        ("/status/204", ConnectionError, "204"),
        ("/tornzip", ConnectionError, "breaks off|could not be read"),
        ("/notzip", ConnectionError, "could not be read"),
        ("/brotli", ValueError, "compressed with 'br'"),
        ("/torn", ConnectionError, "could not be read"),
        ("/garbage", ConnectionError, "could not be read"),
        ("/hangup", ConnectionError, "could not be read"),
        ("/hugeheaders", ConnectionError, "could not be read"),
    ],
)
def test_broken_answers_are_clear_errors(get, path, kind, said):
    with pytest.raises(kind, match=said):
        get(path)


def test_a_circle_is_told(get):
    with pytest.raises(ConnectionError, match="circle"):
        get("/loop/")


@pytest.mark.parametrize("path", ["/drip", "/dripheaders", "/silent"])
@pytest.mark.timeout(300)
def test_slow_servers_are_cut_off(get, path):
    with pytest.raises(TimeoutError, match=r"within 0\.6 s"):
        get(path, timeout=0.6)


def test_an_endless_page_is_cut_at_the_byte(site, get):
    site.sent = 0
    page = get("/endless", max_bytes=100_001)
    assert len(page.body) == 100_001 and page.truncated and site.sent < 20_000_000


def test_a_compressed_bomb_is_not_blown_up(site, get):
    import tracemalloc

    tracemalloc.start()
    page = get("/bomb", max_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(page.body) == 1_000_000 and page.truncated and peak < 60_000_000


def test_what_is_compressed_is_unpacked(get):
    assert get("/gzip").body.startswith(b"<p>Gastro")


def test_busy_servers_are_asked_again_and_refusals_are_not(site):
    assert fetch_page(site.url("/busy/a"), allow_private=True).body and site.tries["/busy/a"] == 3
    for path in ("/status/404", "/status/403", "/brotli"):
        site.tries[path] = 0
        with pytest.raises((OSError, ValueError)):
            fetch_page(site.url(path), allow_private=True, attempts=3)
        assert site.tries[path] == 1


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": -1}, {"max_bytes": 0}, {"max_bytes": True}, {"attempts": 0}])
def test_limits_must_be_positive(site, wrong):
    with pytest.raises(ValueError, match="positive"):
        fetch_page(site.url("/x"), **wrong)


# ---------------------------------------------------------------- pages as documents


@pytest.mark.parametrize("kind", ["image/png", "application/zip", "video/mp4", "application/x-msdownload", "application/octet-stream"])
def test_other_types_are_skipped(site, kind):
    site.pages["/blob"] = (kind, b"\x00\x01\x02" * 200)
    (item,) = read_page(site.url("/blob"), fetch={"allow_private": True})
    assert isinstance(item, Skipped) and "not read" in item.reason and not item.temporary


def test_a_type_that_lies_is_found_out(site):
    site.pages["/lie"] = ("text/plain", b"\x89PNG\x00" * 100)
    (item,) = read_page(site.url("/lie"), fetch={"allow_private": True})
    assert isinstance(item, Skipped) and "binary" in item.reason


def test_short_pages_are_skipped_on_every_way(site):
    site.pages["/short"] = ("text/html", b"<p>Not found</p>")
    assert "fewer than 200" in next(iter(read_page(site.url("/short"), fetch={"allow_private": True}))).reason
    registry = {"s": [site.url("/short")]}
    assert fetch_curated("s", registry=registry, allow_private=True) == []
    found = list(read_search("x", provider=_Fake([SearchResult("t", site.url("/short"), "excerpt")]), fetch={"allow_private": True}))
    assert all(isinstance(i, Skipped) for i in found)


def test_a_page_cut_inside_a_character_stays_readable(site):
    site.pages["/umlaut"] = ("text/plain; charset=utf-8", ("ü" * 500).encode())
    assert fetch_url(site.url("/umlaut"), max_bytes=501, allow_private=True) == "ü" * 250


def test_half_a_json_file_is_not_read(site):
    site.pages["/x.json"] = ("application/json", b'[{"a": 1}, {"a": 2}]')
    (item,) = read_page(site.url("/x.json"), fetch={"allow_private": True, "max_bytes": 10})
    assert isinstance(item, Skipped) and "half of a json" in item.reason


def test_rows_from_the_web_are_rows(site):
    site.pages["/v.csv"] = ("text/csv", b"id,reason,ssn\n1,bleeding,123-45-6789\n")
    found = list(read_page(site.url("/v.csv"), fetch={"allow_private": True}))
    assert [i.content for i in found if isinstance(i, LabelledDocument)] == ["id: 1\nreason: bleeding"]


def test_a_site_is_read_within_its_folder_and_its_rules(site):
    link = "".join(f"<a href='{a}'>x</a>" for a in ("b.html", "/other.html", "no/x.html", "mailto:a@b.c", "http://[bad", "javascript:x", "b.html#top"))
    site.pages.update({
        "/d/": ("text/html", f"<title>A</title><p>{PROSE}</p>{link}".encode()),
        "/d/b.html": ("text/html", f"<title>B</title><p>{PROSE}</p><a href='./'>back</a>".encode()),
        "/other.html": ("text/html", f"<p>{PROSE}</p>".encode()),
        "/d/no/x.html": ("text/html", f"<p>{PROSE}</p>".encode()),
        "/robots.txt": ("text/plain", b"User-agent: *\nDisallow: /d/no/"),
    })  # fmt: skip
    found = list(read_site(site.url("/d/"), pages=10, fetch={"allow_private": True}))
    assert [i.title for i in found if isinstance(i, LabelledDocument)] == ["A", "B"]
    assert ["robots.txt" in i.reason for i in found if isinstance(i, Skipped)] == [True]
    assert "/other.html" not in site.asked


def test_failures_are_warnings_that_name_what_was_skipped(site, caplog):
    site.pages["/good"] = ("text/html", f"<p>{PROSE}</p>".encode())
    registry = {"mine": [site.url("/status/500"), site.url("/good"), "http://127.0.0.1:9/x"]}
    with caplog.at_level(logging.WARNING):
        documents = fetch_curated("mine", registry=registry, allow_private=[site.host], timeout=60)
    assert [d.url for d in documents] == [site.url("/good")] and documents[0].source == "mine"
    assert site.url("/status/500") in caplog.text and "http://127.0.0.1:9/x" in caplog.text


def test_the_curated_list_has_the_reference_names_and_can_be_changed(monkeypatch, site):
    assert {n: len(u) for n, u in CURATED_SOURCES.items()} == {"JuliaHealth": 2, "OMOP CDM": 2, "OHDSI": 2, "FunSQL.jl": 3}
    assert all(u.startswith("https://") for urls in CURATED_SOURCES.values() for u in urls)
    site.pages["/good"] = ("text/html", f"<p>{PROSE}</p>".encode())
    monkeypatch.setitem(CURATED_SOURCES, "OHDSI", [site.url("/good")])
    found = ingest(["OHDSI"], allow_private=True)
    assert [d.source for d in found] == ["OHDSI"]
    assert "not a curated source" in next(iter(read_curated("nobody"))).reason


def test_pages_that_are_down_stay_indexed_and_pages_that_are_gone_go(site, tmp_path):
    site.pages["/p"] = ("text/html", f"<title>P</title><p>{PROSE}</p>".encode())
    options = {"allow_private": True, "attempts": 1}
    index = ingest_to_index(tmp_path / "i", site.url("/p"), store="local", **options)
    assert len(index.documents) == 1
    kept = site.pages.pop("/p")
    site.stalled.add("/p")
    down = ingest_to_index(index, site.url("/p"), timeout=0.5, **options).last_ingest
    assert down.deleted == () and down.skipped[0].temporary and len(index) > 0
    site.stalled.remove("/p")
    done = ingest_to_index(index, site.url("/p"), **options).last_ingest
    assert len(done.deleted) == 1 and len(index) == 0 and "404" in done.skipped[0].reason and kept


# ---------------------------------------------------------------- HTML


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>Hello <b>world</b></p>", "Hello world"),
        ("<p>&amp;lt; &lt; &#60; &#x3c; &mdash; &nbsp;x</p>", "&lt; < < < — x"),
        ("<p>a</p><!-- <p>b</p> --><script>c</script><style>d</style><p>e</p>", "a\n\ne"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>", "a | b\nc | d"),
        ("<ul><li>a</li><li>b</li></ul>", "- a\n- b"),
        ("<h2>T</h2>x", "## T\n\nx"),
        ("<pre>a\n  b</pre>", "```\na\n  b\n```"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<p>unclosed <b>x", "unclosed x"),
        ("", ""),
        ("<", "<"),
        ("<script>", ""),
        ("just text", "just text"),
        ("<p title='>'>x</p>", "x"),
        ("<title>t</title><nav>a</nav><main><h1>b</h1></main>", "a\n\n# b"),
        ("<html><head><title>t</title><link rel=x><meta name=y></head><body>a</body></html>", "a"),
    ],
)
def test_markup_becomes_text(markup, text):
    assert html_to_text(markup) == text


@given(st.text(alphabet="<>/&;#x ab\"'!-ptdrhl1", max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_markup_is_read_without_an_error(markup):
    assert isinstance(html_to_text(markup), str) and isinstance(html_links(markup, "https://a.org/"), list)


@pytest.mark.parametrize("markup", ["<div>" * 50_000 + "x", "<a " + "b=c " * 50_000 + ">x</a>", "<td>" * 20_000, "&#" + "9" * 10_000 + ";", "<![CDATA[" + "x" * 10_000, "\ud800<p>x"])
@pytest.mark.timeout(300)
def test_hostile_markup_is_read(markup):
    assert isinstance(html_to_text(markup), str) and isinstance(whole_page_text(markup), str)


def test_entities_of_the_system_are_not_expanded(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("TOP SECRET")
    markup = f'<!DOCTYPE html [<!ENTITY x SYSTEM "{secret.as_uri()}">]><html><body><p>&x; hello</p></body></html>'
    assert "TOP SECRET" not in html_to_text(markup) + whole_page_text(markup)


# ---------------------------------------------------------------- search


class _Fake:
    name = "fake"

    def __init__(self, results):
        self.results, self.asked = results, []

    def search(self, query, max_results):
        self.asked.append(query)
        return self.results


def test_search_is_off_until_a_provider_is_named():
    for call in (lambda: web_search("x"), lambda: ingest(None, query="x"), lambda: ingest_to_index(None, None, query="x")):
        with pytest.raises(PermissionError, match="web search is off"):
            call()


@pytest.mark.parametrize(
    "query",
    [
        "bleeding of Mrs. Ada Byron", "patient born 1950-03-02", "MRN 00123456 hemorrhage", "call 555-123-4567", "call (555) 123-4567", "ada@example.org",
        "123-45-6789", "seen on 03/02/1950", "12 Elm Street bleeding", "seen on 2 March 1950", "host 10.0.0.1", "record #778899",
        "WHERE city = 'Zqx vwt'", "person_source_value = 'Zqx vwt'", '{"last_name": "Zqx vwt"}',
    ],
)  # fmt: skip
def test_a_query_with_patient_data_never_reaches_the_provider(query):
    fake = _Fake([])
    with pytest.raises(PermissionError, match="was not sent") as error:
        web_search(query, provider=fake)
    assert fake.asked == [] and not any(part in str(error.value) for part in ("Byron", "1950", "00123456", "4567", "ada@", "Zqx"))


@pytest.mark.parametrize("query", ["Ada Byron, MRN 0012345", "WHERE city = 'Zqx vwt'"])
def test_a_refused_query_is_an_error_of_the_call_and_is_shown_nowhere(query, tmp_path, caplog):
    fake, kept = _Fake([]), SourceDocument("note", "", "Note", "A note on bleeding.")
    index = ingest_to_index(tmp_path / "index", None, docs=[kept])
    before, generation, calls = (tmp_path / "index" / "manifest.json").read_text(), index.generation, 0
    for call in (lambda: ingest([kept], query=query, provider=fake), lambda: ingest_to_index(index, [kept], query=query, provider=fake)):
        with pytest.raises(PHIError, match="was not sent to fake") as error:
            call()
        assert not any(part in str(error.value) for part in ("Byron", "0012345", "Zqx"))
        calls += 1
    assert calls == 2 and fake.asked == [] and index.generation == generation and (tmp_path / "index" / "manifest.json").read_text() == before
    assert not any(part in caplog.text for part in ("Byron", "0012345", "Zqx", "skipped"))


def test_a_refusal_to_send_something_is_not_skipped():
    def read():
        yield SourceDocument("a", "", "A", "text")
        raise PHIError("nothing was sent")

    with pytest.raises(PHIError, match="nothing was sent"):
        list(read_source(IngestSource("search:x", read)))


@pytest.mark.parametrize("query", ["OMOP condition_occurrence table", "ICD-10 K92.2 gastrointestinal hemorrhage 2024", "metformin 500 mg", "CDM v5.4", "COVID-19 B12 E11.9"])
def test_ordinary_queries_pass(query):
    fake = _Fake([SearchResult("t", "https://a.org")])
    assert web_search(query, provider=fake) and fake.asked == [query]


def test_results_are_deduplicated_bounded_and_fetched_under_the_same_rules(site):
    site.pages["/s"] = ("text/html", f"<title>S</title><p>{PROSE}</p>".encode())
    fake = _Fake([SearchResult("t", site.url("/s")), SearchResult("t", site.url("/s")), SearchResult("t", ""), SearchResult("u", "file:///etc/passwd"), SearchResult("v", "http://10.0.0.1/")])
    found = list(read_search("x", provider=fake, max_results=3, fetch={"allow_private": [site.host], "attempts": 1}))
    assert [i.title for i in found if isinstance(i, LabelledDocument)] == ["S"] and len([i for i in found if isinstance(i, Skipped)]) == 2


def test_the_ddgs_client_is_called_as_it_wants_and_its_faults_are_warnings():
    import inspect

    ddgs = pytest.importorskip("ddgs")
    known = inspect.signature(ddgs.DDGS.text).parameters
    calls = []

    class Client:
        def text(self, query, **options):
            calls.append((query, options))
            return [{"title": "T", "href": "https://a.org", "body": "B"}]

    (result,) = web_search("omop", provider=DuckDuckGoProvider(client=Client()), max_results=3)
    assert (result.title, result.url, result.content) == ("T", "https://a.org", "B")
    assert calls[0][1]["max_results"] == 3 and all(o in known or any(p.kind == p.VAR_KEYWORD for p in known.values()) for o in calls[0][1])

    class Down:
        def text(self, query, **options):
            raise ddgs.exceptions.RatelimitException("429")

    (item,) = read_search("omop", provider=DuckDuckGoProvider(client=Down()))
    assert item.temporary and "429" in item.reason


# ---------------------------------------------------------------- whole pages


@pytest.fixture(scope="module")
def pages(project_root):
    return project_root / "tests" / "data" / "pages"


def test_a_documentation_page_keeps_its_text_tables_and_code(site, pages, tmp_path):
    site.pages["/docs/person.html"] = ("text/html; charset=utf-8", (pages / "person_table.html").read_bytes())
    (document,) = read_page(site.url("/docs/person.html"), "OMOP CDM", fetch={"allow_private": True})
    for part in ("central identity management", "dates < 1850 & later than today's", "8532 for women", "gender_concept_id", "SELECT COUNT(*)", "how and when a person dies", "death"):
        assert part in document.content, part
    for part in ("dataLayer", "white-space", "tracker.example", "buildTabsets", "dropdown"):
        assert part not in document.content, part
    assert "## " in document.content and document.url == site.url("/docs/person.html")
    index = ingest_to_index(docs=[document], store="local")
    hit = index.search("Which concept id means women?", 1)[0]
    assert "8532" in hit.text and "person" in str(hit.metadata["headings"])


def test_a_wall_of_cookies_is_left_out_by_the_audit(site, pages):
    site.pages["/wall"] = ("text/html", (pages / "cookie_wall.html").read_bytes())
    with pytest.raises(ValueError, match="quality audit rejects"):
        ingest_to_index(None, [site.url("/wall")], allow_private=True, audit=True, min_length=0, store="local")


def test_a_rendered_notebook_is_read(site, project_root, tmp_path):
    exporter = pytest.importorskip("nbconvert").HTMLExporter()
    markup, _ = exporter.from_filename(str(project_root / "nbs" / "02_lazy.ipynb"))
    text = html_to_text(markup)
    assert len(text) < len(markup) / 20
    assert "stays fast" in text and "mathjax" not in text.lower() and "--jp-" not in text


# ---------------------------------------------------------------- bundles


@pytest.fixture
def bundle(site, tmp_path):
    from healthrag.ingestion import save_bundle

    site.pages["/guide.md"] = ("text/markdown", b"# Guide\n" + b"Bleeding is coded in SNOMED. " * 20)
    site.pages["/more.html"] = ("text/html; charset=latin-1", "<main><h1>Caf\u00e9</h1><p>Transfusion follows bleeding.</p></main>".encode("latin-1"))
    registry = {"guide": [site.url("/guide.md"), site.url("/404/")], "more": site.url("/more.html")}  # one address needs no list
    lost = save_bundle(tmp_path / "bundle", registry=registry, fetch={"allow_private": True, "attempts": 1})
    assert len(lost) == 1 and "/404/" in lost[0].source
    return tmp_path / "bundle", registry


def test_a_bundle_gives_the_documents_of_the_web_and_asks_nobody(site, bundle):
    from healthrag.ingestion import read_bundle, read_curated

    folder, registry = bundle
    live = [d for d in read_curated(registry=registry, min_length=0, fetch={"allow_private": True, "attempts": 1}) if not hasattr(d, "reason")]
    asked = len(site.asked)
    kept = list(read_bundle(folder, min_length=0))
    assert [(d.source, d.url, d.title, d.content) for d in kept] == [(d.source, d.url, d.title, d.content) for d in live] and len(kept) == 2
    from healthrag.ingestion import ingest

    assert len(ingest("curated", registry=registry, bundle=folder, min_length=0)) == 2
    assert len(site.asked) == asked


@pytest.mark.parametrize("harm, says", [(b"", "SHA-256"), (None, "is missing")])
def test_a_changed_page_of_a_bundle_is_not_read(bundle, harm, says):
    from healthrag.ingestion import read_bundle

    folder, _ = bundle
    for page in folder.glob("*.page"):
        page.unlink() if harm is None else page.write_bytes(harm)
    assert [says in item.reason for item in read_bundle(folder)] == [True, True]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '[{"file": null}]', '[{"source": "a"}]', "[" * 100_000, '[{"source": "a", "url": "u", "file": "../../x", "sha256": "0"}]'])
def test_a_hostile_list_of_a_bundle_is_an_error_or_a_reason(tmp_path, text):
    from healthrag.ingestion import read_bundle

    (tmp_path / "bundle.json").write_text(text)
    (tmp_path.parent / "x").write_text("secret")
    try:
        assert all("is missing" in item.reason for item in read_bundle(tmp_path))
    except ValueError as error:
        assert "save_bundle" in str(error)


def test_a_failed_refresh_keeps_the_stored_page(site, bundle):
    from healthrag.ingestion import read_bundle, save_bundle

    folder, registry = bundle
    before = [d.content for d in read_bundle(folder, min_length=0)]
    site.pages.clear()
    assert len(save_bundle(folder, registry=registry, fetch={"allow_private": True, "attempts": 1})) == 3
    assert [d.content for d in read_bundle(folder, min_length=0)] == before
    with pytest.raises(ValueError, match="not a curated source"):
        save_bundle(folder, "no such", registry=registry)
    with pytest.raises(FileNotFoundError, match="holds no bundle"):
        list(read_bundle(folder / "none"))


@pytest.mark.parametrize("attribute", ["a{0}=1 ", "a{0} ", 'a{0}="1"', "a{0}='>' ", "\na{0}", 'a{0}="<"', "a{0}=>"], ids=ascii)
def test_a_tag_with_countless_attributes_is_read(attribute):  # the parser alone takes the square of their number: minutes
    many = "".join(attribute.format(i) for i in range(120_000))
    for markup in (f"<p>before<b {many}>in</b> after</p>", f"<p {many}>before in after", f"<p>before in after<a {many}"):
        text = html_to_text(markup)
        assert "before" in text and html_links(markup, "https://a.org/") == []


@pytest.mark.parametrize(("markup", "text"), [
    (f'<p>a<img src="data:image/png;base64,{"Ab/=" * 100_000}" alt="the picture">b</p>', "athe pictureb"), ('<p><a href="x"">one</a> "two" <a href="y">three</a></p>', 'one "two" three'),
    (f"<p title='{'a b ' * 400}'>kept</p>", "kept"), (f"<p>{'<b>' * 200}deep{'</b>' * 200}</p>", "deep"),
])  # fmt: skip
def test_long_tags_that_are_meant_stay(markup, text):
    assert text in html_to_text(markup)
