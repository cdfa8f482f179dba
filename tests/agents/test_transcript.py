"""Transcripts: append-only, saved after every step, read back identically, with a torn last line or without."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.agents import (
    ContextEvent,
    DamagedTranscript,
    Message,
    OrphanResult,
    Transcript,
    TranscriptError,
    UnansweredCalls,
)
from dslib.agents.messages import assistant, tool_call, tool_result, user


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "transcript.jsonl"


def written(path):
    transcript = Transcript(path)
    transcript.append(user("größer als\u2028nichts"))
    transcript.append(
        Message(
            role="assistant",
            reasoning_content="why",
            tool_calls=[tool_call("f", {"n": 1})],
            usage={"prompt_tokens": 7, "completion_tokens": 2},
            refusal=None,
        )
    )
    transcript.append(tool_result("call_0", "1"))
    transcript.note("violation", rule="answer_by_tool")
    transcript.record(ContextEvent(kind="reset", at=3, dropped=((1, 3),)))
    transcript.append(assistant("done"))
    return transcript


def test_what_is_read_is_what_was_written(path):
    transcript = written(path)
    for again in (Transcript(path), Transcript.load(path)):
        assert again == transcript
        assert again.entries == transcript.entries
        assert again.to_openai() == transcript.to_openai()
        assert again[1].usage.prompt_tokens == 7
    assert len(transcript) == 4
    assert [event.kind for event in transcript.events] == ["reset"]
    assert [note.data for note in transcript.notes] == [{"rule": "answer_by_tool"}]


def test_every_step_is_on_disk_as_soon_as_it_is_said(path):
    transcript = Transcript(path)
    for count in range(1, 4):
        transcript.append(user("x"))
        assert len(Transcript.load(path)) == count


def test_a_line_torn_anywhere_costs_that_line_alone_and_the_run_goes_on(path):
    whole = written(path)
    data = path.read_bytes()
    last = data[:-1].rindex(b"\n") + 1
    for end in range(last, len(data) + 1):
        path.write_bytes(data[:end])
        again = Transcript(path)
        lost = end < len(data) - 1
        assert again.entries == whole.entries[: len(whole.entries) - lost]
        again.append(user("on"))
        assert Transcript.load(path) == again
        assert again[-1] == user("on")


def test_zeros_at_the_end_as_a_power_cut_leaves_them_are_cut_away(path):
    whole = written(path)
    with path.open("ab") as file:
        file.write(b"\0" * 300)
    assert Transcript.load(path) == whole
    assert Transcript(path) == whole


def test_a_damaged_line_before_the_last_is_named(path):
    written(path)
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:20]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DamagedTranscript, match="line 2 of"):
        Transcript(path)


def test_reading_leaves_the_file_as_it_is_and_a_missing_one_is_said(path):
    written(path)
    with path.open("ab") as file:
        file.write(b'{"mess')
    before = path.read_bytes()
    Transcript.load(path).append(user("x"))
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        Transcript.load(path.with_name("none"))


def test_calls_that_a_crash_left_open_are_known(path):
    transcript = Transcript(path)
    transcript.append(user("q"))
    transcript.append(assistant(None, [tool_call("f", id="a"), tool_call("g", id="b")]))
    transcript.append(tool_result("b", "x"))
    again = Transcript(path)
    assert again.open_calls == ("a",)
    again.append(tool_result("a", "interrupted"))
    assert again.open_calls == ()


def test_a_file_written_by_someone_else_is_refused(path):
    one, two = Transcript(path), Transcript(path)
    one.append(user("x"))
    with pytest.raises(TranscriptError, match="someone else"):
        two.append(user("y"))
    assert len(two) == 0


def test_what_the_disk_did_not_take_was_not_said(path, monkeypatch):
    transcript = Transcript(path)
    transcript.append(user("x"))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            transcript.append(user("y"))
    assert len(transcript) == 1
    transcript.append(user("z"))
    assert Transcript.load(path) == transcript


def test_results_belong_to_open_calls_and_calls_to_results():
    transcript = Transcript()
    transcript.append(user("q"))
    with pytest.raises(OrphanResult, match="'a', but no call is waiting"):
        transcript.append(tool_result("a", "x"))
    transcript.append(assistant(None, [tool_call("f", id="a"), tool_call("f", id="b")]))
    with pytest.raises(OrphanResult, match=r"those waiting are \['a', 'b'\]"):
        transcript.append(tool_result("c", "x"))
    with pytest.raises(UnansweredCalls, match=r"\['a', 'b'\]"):
        transcript.append(user("hurry"))
    transcript.append(tool_result("b", "x"))
    with pytest.raises(OrphanResult, match="'b'"):
        transcript.append(tool_result("b", "again"))  # one result an id
    transcript.append(tool_result("a", "x"))
    assert len(transcript) == 4  # what was refused left nothing behind
    transcript.append(assistant(None, [tool_call("f", id="a")]))  # servers number each answer anew
    assert transcript.open_calls == ("a",)


def test_an_event_stands_where_it_is_recorded():
    transcript = Transcript.of([user("q")])
    for event in (
        ContextEvent(kind="reset", at=2, dropped=((0, 1),)),
        ContextEvent(kind="reset", at=1, dropped=((0, 2),)),
        ContextEvent(kind="reset", at=1, dropped=((1, 1),)),
    ):
        with pytest.raises(ValueError, match="there are 1 messages"):
            transcript.record(event)
    assert transcript.events == ()


def test_it_reads_as_a_sequence_of_messages():
    transcript = Transcript.of([user("a"), assistant("b")])
    assert [m.text for m in transcript] == ["a", "b"]
    assert transcript[-1].text == "b"
    assert transcript[:1] == [user("a")]
    assert transcript.messages == tuple(transcript)
    assert Transcript() == Transcript()
    assert len(Transcript()) == 0
    assert "2 messages" in repr(transcript)


@given(data=st.data())
def test_generated_conversations_survive_the_disk(conversations, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    transcript = Transcript.of(data.draw(conversations), path)
    assert Transcript.load(path) == transcript
    assert Transcript.from_openai(transcript.to_openai()).messages == transcript.messages
