"""Generation against a real local server, well-behaved and not: nothing received is lost."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from helpers.chat_server import KEY, ChatServer, Status, completion, drip, flood, slow
from helpers.variants import NAMES, SOURCES, fine, good, rows
from inrun.variants import Endpoint, Settings, Source, VariantsError, generate
from inrun.variants.prompts import CATEGORIES, SYSTEM
from inrun.variants.tokens import CAPITALS


def first_then(bad):
    """The first reply to each source is ``bad(text)``, later ones are fine."""
    seen = set()

    def answer(text, request):
        if text in seen:
            return fine(text, request)
        seen.add(text)
        return bad(text)

    return answer


@pytest.fixture
def out(tmp_path):
    return tmp_path / "variants.jsonl"


def go(server, out, sources=SOURCES, settings=None, timeout=30, retries=2, model="m", **more):
    endpoint = Endpoint(model, server.url, timeout=timeout, retries=retries)
    return generate(sources, out, endpoint, CAPITALS, settings, **more)


def test_variants_in_order_with_the_papers_request(out, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    with ChatServer(fine) as server:
        outcome = go(server, out, settings=Settings(seed=7, request={"temperature": 0.5}))
    assert (outcome.complete, outcome.asked, outcome.cached) == (6, 6, 0)
    assert [r["id"] for r in rows(out)] == [0, 1, 2, 3, 4, 5]
    assert rows(out)[1] == SOURCES[1]._asdict() | good(SOURCES[1].z_star)
    assert set(server.keys) == {f"Bearer {KEY}"}
    request = server.requests[0]
    assert request["messages"][0] == {"role": "system", "content": SYSTEM}
    assert "Forbidden tokens:\n" in request["messages"][1]["content"]
    assert request["response_format"] == {"type": "json_object"}
    assert (request["model"], request["seed"], request["temperature"]) == ("m", 7, 0.5)
    for file in out.parent.iterdir():  # hidden ones too
        assert KEY not in file.read_text()


def test_fields_can_be_left_out_but_not_ours(out):
    with ChatServer(fine) as server:
        go(server, out, SOURCES[:1], Settings(request={"seed": None, "top_p": 0.9}))
    assert "seed" not in server.requests[0] and server.requests[0]["top_p"] == 0.9
    with pytest.raises(VariantsError, match="must not set messages, model"):
        Settings(request={"model": "x", "messages": []})


def test_a_second_run_asks_nothing_and_changes_nothing(out):
    with ChatServer(fine) as server:
        go(server, out)
        first = out.read_bytes()
        again = go(server, out)
        assert (again.there, again.asked, len(server.requests)) == (6, 0, 6)
        out.unlink()
        replayed = go(server, out)
        assert (replayed.complete, replayed.cached, len(server.requests)) == (6, 6, 6)
    assert out.read_bytes() == first


def test_the_seed_selects_and_the_order_of_arrival_does_not_matter(out, tmp_path):
    many = lambda text, request: slow(  # noqa: E731
        0.1 if NAMES[0] in text else 0, completion(json.dumps(good(text, 5)))
    )
    with ChatServer(many) as server:
        go(server, out)
        go(server, tmp_path / "one.jsonl", workers=1)
        go(server, tmp_path / "seed.jsonl", settings=Settings(seed=1))
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert out.read_bytes() != (tmp_path / "seed.jsonl").read_bytes()


BAD = {
    "malformed JSON": lambda text: completion('{"paraphrase": ["half a'),
    "cut off": lambda text: completion('{"paraphrase": ["half a', finish="length"),
    "refusal": lambda text: completion(None, refusal="I cannot help with that."),
    "empty reply": lambda text: completion(""),
    "missing keys": lambda text: completion(json.dumps({"paraphrase": good(text)["paraphrase"]})),
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_replies_are_asked_again(out, problem):
    with ChatServer(first_then(BAD[problem])) as server:
        outcome = go(server, out)
        assert outcome.complete == 6 and outcome.problems == {problem: 6}
        assert sorted(r["seed"] for r in server.requests) == [0] * 6 + [1] * 6
        out.unlink()
        assert go(server, out).asked == 0  # bad replies are on record, too
    assert len(rows(out.with_suffix(".cache.jsonl"))) == 12


def test_replies_of_other_shapes_are_read_or_refused():
    from inrun.variants.client import Reply

    fenced = Reply('```json\n{"paraphrase": "one string", "similar_topic": 3}\n```', None, "stop")
    assert fenced.read() == ({"paraphrase": ["one string"]}, "missing keys")
    assert Reply("[1]", None, "stop").read() == ({}, "malformed JSON")
    assert Reply("[" * 100_000, None, "stop").read() == ({}, "malformed JSON")
    assert Reply("{}", None, "content_filter").read() == ({}, "refusal")


def test_candidates_of_all_rounds_count(out):
    def scarce(text, request):
        turn = request["seed"]
        return completion(json.dumps({c: x[turn : turn + 1] for c, x in good(text).items()}))

    with ChatServer(scarce) as server:
        short = go(server, out, SOURCES[:2], rounds=2)
        assert short.complete == 0 and rows(out) == []
        assert short.short[0] == {"id": 0, "lacks": dict.fromkeys(CATEGORIES[1:], 1)}
        kept = go(server, out, SOURCES[:2], rounds=2, keep_short=True)
        assert kept.asked == 0 and [len(r["paraphrase"]) for r in rows(out)] == [2, 2]
        full = go(server, out, SOURCES[:2], rounds=3)
        assert (full.complete, full.asked, full.cached) == (2, 2, 4)
    assert rows(out) == [s._asdict() | good(s.z_star) for s in SOURCES[:2]]


def test_rate_limits_and_server_errors_are_waited_out(out):
    codes = iter([429, 503, 429])

    def limited(text, request):
        if code := next(codes, None):
            raise Status(code, "slow down", Retry_After_ms="10")
        return fine(text, request)

    with ChatServer(limited) as server:
        outcome = go(server, out, retries=3)
        assert outcome.complete == 6 and not outcome.failed and len(server.requests) == 9


def test_a_source_without_reply_is_set_aside_and_asked_next_time(out):
    down = {SOURCES[2].z_star: "429", SOURCES[4].z_star: "slow"}

    def answer(text, request):
        if down.get(text) == "429":
            raise Status(429, "quota", Retry_After_ms="1")
        return slow(60, fine(text, request)) if text in down else fine(text, request)

    with ChatServer(answer) as server:
        outcome = go(server, out, timeout=3, retries=0, workers=1)
        assert [r["id"] for r in rows(out)] == [0, 1, 3, 5]
        assert [x["why"] for x in outcome.failed] == [
            "127.0.0.1 answered HTTP 429, quota",
            "no answer from 127.0.0.1 within 3 s, once; a larger --timeout may help",
        ]
        down.clear()
        outcome = go(server, out)
        assert (outcome.there, outcome.complete, outcome.asked) == (4, 2, 2)
    assert [r["id"] for r in rows(out)] == [0, 1, 2, 3, 4, 5]


def test_an_endpoint_that_is_down_stops_the_run(out):
    with ChatServer(fine) as server:
        go(server, out, SOURCES[:2])
        kept = out.read_bytes()
    with pytest.raises(VariantsError, match="no reply for 3 sources in a row: cannot reach") as e:
        go(server, out, retries=0)
    assert str(out) in str(e.value) and "run the same command again" in str(e.value)
    assert out.read_bytes() == kept


@pytest.mark.parametrize("code", [401, 404])
def test_a_wrong_key_or_model_stops_at_once_and_hides_the_key(out, monkeypatch, code):
    monkeypatch.setenv("MY_KEY", KEY)

    def refuse(text, request):
        raise Status(code, f"\x1b[2Jbad key {KEY} or no such model")

    with ChatServer(refuse) as server:
        endpoint = Endpoint("m", server.url, key_env="MY_KEY")
        with pytest.raises(VariantsError) as error:
            generate(SOURCES, out, endpoint, CAPITALS, workers=1)
        assert len(server.requests) == 1
    assert f"HTTP {code}, [2Jbad key *** or no such model: check --model" in str(error.value)
    assert "MY_KEY" in str(error.value)


def test_a_web_page_is_not_taken_for_a_reply(out):
    for page in ("<html>hello</html>", {}, {"choices": []}):
        with ChatServer(lambda text, request, page=page: page) as server:
            outcome = go(server, out, SOURCES[:1])
        assert "did not answer as an OpenAI-compatible endpoint" in outcome.failed[0]["why"]


def test_files_of_a_killed_run_are_mended(out):
    with ChatServer(fine) as server:
        go(server, out, workers=1)
        whole, cache = out.read_bytes(), out.with_suffix(".cache.jsonl")
        out.write_bytes(whole[:-100])  # in the middle of the last line
        cache.write_bytes(cache.read_bytes()[:-5])
        outcome = go(server, out)
        assert (outcome.there, outcome.complete, outcome.asked) == (5, 1, 1)
        assert out.read_bytes() == whole
        out.write_bytes(whole[:-1])  # only the line's end is missing
        assert go(server, out).there == 6 and out.read_bytes() == whole


@pytest.mark.parametrize("headers", [True, False])
def test_the_timeout_is_of_the_whole_request(out, headers):
    def answer(text, request):  # 6 s, of which no single read takes longer than 0.1 s
        return drip(fine(text, request), headers=headers)

    with ChatServer(answer) as server:
        outcome = go(server, out, SOURCES[:1], timeout=0.5, retries=0)
        assert len(server.requests) == 1
    assert outcome.failed[0]["why"].startswith("no answer from 127.0.0.1 within 0.5 s, once")


def test_a_reply_has_a_largest_size(out):
    zeros = bytes(1 << 20)
    replies = {
        "endless": (flood(zeros, 64), "sent more than 8 MB"),
        "packed": (flood(gzip.compress(b" " * (32 << 20)), 1, "gzip"), "sent more than 8 MB"),
        "oddly packed": (flood(zeros[:10], 1, "zstd"), "a reply packed as 'zstd'"),
        "deep": (flood(b"[" * (1 << 20), 1), "did not answer as an OpenAI-compatible endpoint"),
    }
    for name, (reply, why) in replies.items():
        with ChatServer(lambda text, request, reply=reply: reply) as server:
            outcome = go(server, out.with_name(f"{name}.jsonl"), SOURCES[:1], retries=0)
        assert why in outcome.failed[0]["why"], name


def test_the_body_of_a_redirect_is_not_read(out):
    sent = []

    def send(handler):
        handler.send_response(307)
        handler.send_header("Location", "/v1/chat/completions")
        handler.end_headers()
        for _ in range(64):
            handler.wfile.write(bytes(1 << 20))
            sent.append(1 << 20)

    with ChatServer(lambda text, r: fine(text, r) if len(server.requests) > 1 else send) as server:
        outcome = go(server, out, SOURCES[:1], retries=0)
        assert outcome.complete == 1 and len(server.requests) == 2
    assert sum(sent) < 32 << 20  # what the buffers between the two hold
    with ChatServer(lambda text, request: send) as server:
        outcome = go(server, out.with_name("round.jsonl"), SOURCES[:1], retries=0)
        assert len(outcome.failed) == 1 and len(server.requests) == 6


def test_files_of_others_are_not_touched(out, tmp_path):
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_bytes(b'{"a": 1}\n{"cut')  # its last line would be removed if it were ours
    settings = tmp_path / "new.settings.json"
    settings.write_text('{"mine": 1}')
    with ChatServer(fine) as server:
        for output, cache, why in (
            (foreign, None, "was not written by inrun variants"),
            (out, foreign, "is not a cache of inrun variants"),
            (tmp_path / "new.jsonl", None, "is not a settings file of inrun variants"),
        ):
            with pytest.raises(VariantsError, match=why):
                go(server, output, SOURCES[:1], cache=cache)
    assert foreign.read_bytes() == b'{"a": 1}\n{"cut' and settings.read_text() == '{"mine": 1}'


def test_a_full_disk_leaves_whole_lines(out, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    with ChatServer(fine) as server:
        go(server, out, SOURCES[:3])
        monkeypatch.setattr("inrun.variants.files.os.fsync", full)
        with pytest.raises(VariantsError, match="No space left on device; make room and run again"):
            go(server, out)
        monkeypatch.undo()
        assert len(rows(out)) == len(rows(out.with_suffix(".cache.jsonl"))) == 3
        assert go(server, out).complete == 3


def test_text_that_no_file_can_hold_does_not_stop_the_command(out):
    odd = SOURCES[0].z_star
    replies = {0: '{"paraphrase": "\ud800"}', 1: json.dumps(good(odd) | {"x": "\ud800"})}
    with ChatServer(lambda text, request: completion(replies[request["seed"]])) as server:
        assert go(server, out, [Source("é\u2028", odd)]).complete == 1
        first = out.read_bytes()
        out.unlink()
        assert go(server, out, [Source("é\u2028", odd)]).cached == 2
    assert out.read_bytes() == first


def test_what_is_there_is_not_mixed_with_something_else(out, tmp_path):
    with ChatServer(fine) as server:
        go(server, out, SOURCES[3:])
        go(server, out, SOURCES[:2])
        assert [r["id"] for r in rows(out)] == [0, 1, 3, 4, 5]  # earlier sources stay
        before = out.read_bytes()
        cases = {
            "seed was 0, is 1": lambda: go(server, out, settings=Settings(seed=1)),
            "model was m, is other": lambda: go(server, out, model="other"),
            "another text under the id 0": lambda: go(server, out, [Source(0, "Other words.")]),
            "written as .jsonl": lambda: go(server, tmp_path / "v.csv"),
            "is not a cache": lambda: go(server, tmp_path / "x.jsonl", cache=out),
        }
        for message, call in cases.items():
            with pytest.raises(VariantsError, match=message):
                call()
        out.with_suffix(".settings.json").unlink()
        with pytest.raises(VariantsError, match="was not written by inrun variants"):
            go(server, out)
    assert out.read_bytes() == before


def test_one_writer_at_a_time(out):
    def nested(text, request):
        with pytest.raises(VariantsError, match="being written by another process"):
            go(server, out)
        return fine(text, request)

    with ChatServer(nested) as server:
        assert go(server, out, SOURCES[:1]).complete == 1


def test_bad_endpoints_are_refused(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(VariantsError, match="environment variable OPENAI_API_KEY is not set"):
        Endpoint("m")
    with pytest.raises(VariantsError, match=r"localhost:8000/v1: write it as http\(s\)://HOST/v1"):
        Endpoint("m", "localhost:8000/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-ключ")
    with pytest.raises(VariantsError, match="characters that no header can carry"):
        Endpoint("m")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(VariantsError, match=r"pip install 'inrun\[variants\]'"):
        Endpoint("m", "http://localhost/v1", "NO_SUCH_KEY").connect()
